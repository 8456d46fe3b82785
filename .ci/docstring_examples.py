"""For the documentation: read a docstring's "Example:" as a section of doctests, as "Examples:" is."""

from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Without this, an example would be rendered as prose, and its lists as broken links."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section before docstrings are parsed."""
        if obj.docstring is not None:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join("Examples:" if line == "Example:" else line for line in lines)
