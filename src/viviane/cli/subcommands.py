"""Commands with subcommands: a misspelt one is refused with the nearest name, an older order of words with the new."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from viviane.core.errors import suggest


class Subcommands(TyperGroup):
    """The group of a command's subcommands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that the first word names, with the words after it."""
        if args and args[0] not in self.commands and not ctx.resilient_parsing and not args[0].startswith("-"):
            path = ctx.command_path
            if len(args) > 1 and args[1] in self.commands:
                ctx.fail(f"the action comes first: {path} {' '.join([args[1], args[0], *args[2:]])}")
            ctx.fail(f"no command {args[0]!r} of {path}; {suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def command_group(help_text: str) -> typer.Typer:
    """Return an app for the subcommands of one command."""
    return typer.Typer(cls=Subcommands, help=help_text, no_args_is_help=True, add_completion=False)
