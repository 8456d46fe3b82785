"""Mutations of Python scripts: values and names of arguments, other members, removed, repeated and exchanged lines."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

VALUES = [
    "0", "-1", "1", "2", "3", "7", "2**31", "2**63", "2**64", "10**30", "1.5", "-0.5", "0.0", "1e300", "float('nan')",
    "float('inf')", "''", "'x'", "'sum'", "'mean'", r"'\0'", "'../x'", "'a' * 3000", "None", "True", "[]", "[1]",
    "[[]]", "[0, 0]", "()", "{}", "{'a': 1}", "b'x'", "['x', 3]", "[None]", "object()", "int",
]  # fmt: skip


def mutate_script(text: str, rng: random.Random, names: Sequence[str]) -> str:
    """Return a script with one or two changes; `names` replace attributes.

    Raises:
        ValueError, SyntaxError: the result is no program.
    """
    tree = ast.parse(text)
    for _ in range(rng.choice([1, 1, 1, 2])):
        rng.choice(_CHANGES)(tree, rng, names)
    changed = ast.unparse(ast.fix_missing_locations(tree))
    compile(changed, "script", "exec")
    return changed


def attribute_names(text: str) -> list[str]:
    """Return all names behind a dot."""
    return sorted({one.attr for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Attribute)})


def _value(rng: random.Random) -> ast.expr:
    return ast.parse(rng.choice(VALUES), mode="eval").body


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [one for one in ast.walk(tree) if isinstance(one, ast.Call) and (one.args or one.keywords)]


def _bodies(tree: ast.AST) -> list[list[ast.stmt]]:
    found = (getattr(one, "body", None) for one in ast.walk(tree))
    return [one for one in found if isinstance(one, list) and len(one) > 1]


def _places(tree: ast.AST, kind: type[ast.expr]) -> Iterator[tuple[Any, Any]]:
    """Yield where expressions of a kind lie: a node and its field, or a list and its index."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, kind):
                yield vars(node), field
            elif isinstance(value, list):
                yield from ((value, place) for place, one in enumerate(value) if isinstance(one, kind))


def _other_argument(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    if calls := _calls(tree):
        call = rng.choice(calls)
        place = rng.randrange(len(call.args) + len(call.keywords))
        if place < len(call.args):
            call.args[place] = _value(rng)
        else:
            call.keywords[place - len(call.args)].value = _value(rng)


def _without_argument(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    if calls := _calls(tree):
        call = rng.choice(calls)
        place = rng.randrange(len(call.args) + len(call.keywords))
        if place < len(call.args):
            del call.args[place]
        else:
            del call.keywords[place - len(call.args)]


def _other_keyword(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    if calls := _calls(tree):
        call = rng.choice(calls)
        if call.keywords and rng.random() < 0.6:
            word = rng.choice(call.keywords)
            word.arg = None if word.arg is None else rng.choice([f"{word.arg}_x", word.arg[:-1] or "x"])
        else:
            call.keywords.append(ast.keyword(arg="xx", value=_value(rng)))


def _nearby_constant(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    """Another value of the same type, which gets further than one of another type."""
    places = list(_places(tree, ast.Constant))
    if not places:
        return
    inside, place = rng.choice(places)
    value = inside[place].value
    others = [one[at].value for one, at in places if type(one[at].value) is type(value)]
    if isinstance(value, bool):
        others = [not value]
    elif isinstance(value, int | float):
        others += [value + 1, value - 1, value * 2, -value, 0]
    inside[place] = ast.Constant(rng.choice(others))


def _any_constant(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    if places := list(_places(tree, ast.Constant)):
        inside, place = rng.choice(places)
        inside[place] = _value(rng)


def _other_name(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    if found := [one for one in ast.walk(tree) if isinstance(one, ast.Attribute)]:
        rng.choice(found).attr = rng.choice(names)


def _other_member(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    """One attribute of the same object in place of another, such as two members of one enumeration."""
    found: dict[str, list[ast.Attribute]] = {}
    for one in ast.walk(tree):
        if isinstance(one, ast.Attribute):
            found.setdefault(ast.dump(one.value), []).append(one)
    if several := [group for group in found.values() if len({one.attr for one in group}) > 1]:
        group = rng.choice(several)
        rng.choice(group).attr = rng.choice(group).attr


def _exchanged_lines(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    body = rng.choice(_bodies(tree))
    one, other = rng.randrange(len(body)), rng.randrange(len(body))
    body[one], body[other] = body[other], body[one]


def _without_line(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    body = rng.choice(_bodies(tree))
    del body[rng.randrange(len(body))]


def _repeated_line(tree: ast.AST, rng: random.Random, names: Sequence[str]) -> None:
    body = rng.choice(_bodies(tree))
    body.insert(rng.randrange(len(body) + 1), copy.deepcopy(rng.choice(body)))


_CHANGES = [
    _other_argument, _other_argument, _other_argument, _without_argument, _other_keyword, _nearby_constant,
    _nearby_constant, _nearby_constant, _any_constant, _other_name, _other_member, _other_member, _exchanged_lines,
    _without_line, _without_line, _repeated_line,
]  # fmt: skip
