"""The installer of `make`: refuses an old Python, reuses a finished environment, remakes a broken one."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fake_python(folder: Path, *, old: bool = False) -> Path:
    """Write a stand-in for Python: knows its version, makes environments that hold itself, installs nothing."""
    path = folder / "python"
    path.write_text(
        f"""#!/bin/sh
echo "$*" >>"{folder}/calls"
case "$*" in
    --version) echo "Python 3.6.15";;
    *version_info*3,\\ 11*) exit {1 if old else 0};;
    *version_info*) echo 3.99.0;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
esac
"""
    )
    path.chmod(0o755)
    return path


def install(folder: Path, python: str | Path, extras: str = "dev") -> subprocess.CompletedProcess[str]:
    for name in ("pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():
            (folder / name).write_text("as it was\n")
    environment = {**os.environ, "PYTHON": str(python), "VENV": ".venv"}
    command = ["sh", str(ROOT / ".ci" / "install"), extras]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def calls(folder: Path, word: str) -> int:
    return sum(word in line for line in (folder / "calls").read_text().splitlines())


def test_no_python(tmp_path: Path) -> None:
    done = install(tmp_path, "no-such-python")
    assert done.returncode == 1
    assert "there is no 'no-such-python' here. Install Python 3.11 or newer" in done.stderr


def test_old_python(tmp_path: Path) -> None:
    done = install(tmp_path, fake_python(tmp_path, old=True))
    assert done.returncode == 1
    assert "is Python 3.6.15, and Viviane needs 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_finished_environment_is_reused_until_the_pins_change(tmp_path: Path) -> None:
    python = fake_python(tmp_path)
    assert install(tmp_path, python).returncode == 0
    assert install(tmp_path, python).stdout == ""
    assert calls(tmp_path, "-m venv") == calls(tmp_path, "pip install") == 1
    install(tmp_path, python, extras="dev,docs")
    assert calls(tmp_path, "-m venv") == 1, "another extra is added to the environment"
    assert calls(tmp_path, "pip install") == 2
    assert install(tmp_path, python).stdout == "", "the first extras are still there"
    (tmp_path / "constraints.txt").write_text("newer\n")
    install(tmp_path, python)
    assert calls(tmp_path, "-m venv") == 2


def test_a_half_made_environment_is_made_again(tmp_path: Path) -> None:
    python = fake_python(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "half").write_text("left over")
    assert install(tmp_path, python).returncode == 0
    assert not (tmp_path / ".venv" / "half").exists()
    (tmp_path / ".venv" / "bin" / "python").unlink()
    assert "making" in install(tmp_path, python).stdout
