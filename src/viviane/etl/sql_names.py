"""Column names as identifiers in SQL, where names that differ only by case stay apart.

DuckDB compares identifiers without regard to case, quoted ones too: `X` and `x` would be one column. Names with
capitals or unusual characters are therefore written another way inside SQL; results get the original names back.
"""

from __future__ import annotations

import re
from typing import Final

_PLAIN: Final = re.compile(r"[a-z0-9_]+")
_LITERAL_OR_NAME: Final = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")*)\"""")


def sql_name(name: str) -> str:
    """Return a name that no other column's differs from only by case: itself, where it is plain.

    Example:
        >>> sql_name("user_id"), sql_name("X"), sql_name("x y")
        ('user_id', 'x~58', 'x_y~782079')
    """
    if _PLAIN.fullmatch(name):
        return name
    return f"{re.sub('[^a-z0-9_]', '_', name.lower())}~{name.encode('utf-8', 'surrogatepass').hex()}"


def quoted(name: str) -> str:
    """Return a column's name as a quoted identifier."""
    return f'"{sql_name(name)}"'


def with_sql_names(sql: str) -> str:
    """Return a query with every quoted identifier as `sql_name` writes it; texts in single quotes stay.

    Example:
        >>> with_sql_names('SELECT "X" FROM "rows" WHERE "x" <> \\'it is "X"\\'')
        'SELECT "x~58" FROM "rows" WHERE "x" <> \\'it is "X"\\''
    """
    return _LITERAL_OR_NAME.sub(
        lambda found: found[0] if found[1] is None else quoted(found[1].replace('""', '"')), sql
    )
