"""What pyproject.toml cannot hold: the page of the package index, whose links do not lead into a checkout.

VIVIANE_REPOSITORY=https://HOST/OWNER/NAME names the repository that a build comes from. README.md's links to files lead
into it, at the tag of the version. A build without it names no place: such links become plain text.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# [text](target) or ![text](target), where the target is neither a URL nor a place on the same page.
FILE_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z][a-z+.-]*:|#)([^)\s]+)\)")


def index_page(readme: str, repository: str, version: str) -> str:
    """Return the README with absolute links to files, or with their text alone where there is no repository."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        return f"{mark}[{text}]({repository}/{'raw' if mark else 'blob'}/v{version}/{target})" if repository else text

    return FILE_LINK.sub(absolute, readme)


if __name__ == "__main__":
    place = os.environ.get("VIVIANE_REPOSITORY", "").rstrip("/")
    number = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    setup(
        long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8"), place, number),
        long_description_content_type="text/markdown",
        project_urls={"Source": place, "Changelog": f"{place}/blob/v{number}/CHANGELOG.md"} if place else {},
    )
