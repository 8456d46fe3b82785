"""What is in the repository and in the wheel: nothing large, nothing of one person's machine, nothing missing."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1_000_000
# Folders that exist on one machine only. Paths inside a sentence, an address or a URL do not match.
PRIVATE = re.compile(r"(?<![\w.:/-])/(?:root|work|home/\w+|Users/\w+|tmp/w|opt/(?:wheels|pypi)\w*)(?:/|\b)")


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_large_files() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes"
        for path in tracked()
        if path.stat().st_size > MAX_BYTES
    ]
    assert not large, "\n".join(large)


def test_no_paths_of_one_machine() -> None:
    found = []
    for path in tracked():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, 1)
            if PRIVATE.search(line)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["open('/" + "root/x')", "see /" + "work/main", "cd /" + "home/ann/code", "/" + "tmp/w/a"]
)
def test_private_paths_are_seen(text: str) -> None:
    assert PRIVATE.search(text)


@pytest.mark.parametrize("text", ["https://a.org/work/x", "data/root/x", "/proc/cpuinfo", "a /workers/ pool"])
def test_other_paths_are_not(text: str) -> None:
    assert not PRIVATE.search(text)


def test_the_wheel_carries_the_package_and_nothing_else(tmp_path: Path) -> None:
    # A copy is built, since setuptools leaves its working files beside the sources.
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("viviane-*-py3-none-any.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    kinds = {".py", ".typed", ".css", ".html", ".js", ".json"}
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in kinds}
    expected = {name for name in expected if name.startswith("viviane/")}
    assert "viviane/py.typed" in names
    assert names == expected, f"missing {sorted(expected - names)}, too much {sorted(names - expected)}"
