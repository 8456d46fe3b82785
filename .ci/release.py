"""Check that the working tree is a release, build it, and tag it: python .ci/release.py [--no-tag]

The version stands in pyproject.toml. CHANGELOG.md must have a dated section for it and nothing under [Unreleased], the
working tree must be clean, the tag must not exist, and VIVIANE_REPOSITORY must name the repository, into which links of
the package index lead. The wheel must contain the package with its data files.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def problems(version: str, changelog: str) -> list[str]:
    """What keeps this tree from being released, from its version and its changelog."""
    found = []
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    unreleased = re.search(r"^## \[Unreleased\]$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if unreleased and re.search(r"^- ", unreleased[1], re.MULTILINE):
        found.append(f"CHANGELOG.md has entries under [Unreleased]: move them to [{version}]")
    return found


def build() -> Path:
    """Build the wheel into dist/ and check what it contains."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=ROOT, check=True)
    wheel = max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = [Path(name) for name in git("ls-files", "src/viviane").splitlines()]
    missing = [name for name in tracked if str(name.relative_to("src")) not in names]
    if missing:
        sys.exit(f"error: {wheel.name} lacks {', '.join(map(str, missing[:5]))}: see [tool.setuptools.package-data]")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-tag", action="store_true", help="check and build only")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = problems(version, (ROOT / "CHANGELOG.md").read_text())
    if git("status", "--porcelain"):
        found.append("the working tree has changes: commit them")
    if git("tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists: raise the version in pyproject.toml")
    if not os.environ.get("VIVIANE_REPOSITORY"):
        found.append("VIVIANE_REPOSITORY=https://HOST/OWNER/NAME is not set: links on the package index need it")
    if found:
        sys.exit("error: this is not a release:\n  " + "\n  ".join(found))
    print(f"built {build().name}")
    if not arguments.no_tag:
        git("tag", "--annotate", f"v{version}", "--message", f"Viviane {version}")
        print(f"tagged v{version}; publish with: git push origin v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
