"""The Makefile: help names every target, and every file that a target runs is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE)


def make(*arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_help_names_every_target() -> None:
    text = make("help")
    absent = [target for target in TARGETS if f"make {target}" not in text]
    # What the other targets call first needs no line of its own.
    assert absent == ["help", "install", "install-docs"]


def test_every_target_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert sorted(phony.split()) == sorted(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_targets_are_sound(target: str) -> None:
    assert make("--dry-run", target)


def test_scripts_that_targets_run_are_there() -> None:
    scripts = re.findall(r"(?:python|sh) ((?:benchmarks|examples|\.ci)/\S+)", MAKEFILE)
    assert len(scripts) >= 5
    assert [script for script in scripts if not (ROOT / script).exists()] == []
