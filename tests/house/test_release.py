"""The release script refuses what is no release; workflows name what exists."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

DATED = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n## [1.2.0] - 2026-01-31\n\n- Something.\n"


def test_a_dated_section_and_nothing_unreleased_is_a_release() -> None:
    assert release.problems("1.2.0", DATED) == []


@pytest.mark.parametrize(
    ("changelog", "problem"),
    [
        (DATED.replace(" - 2026-01-31", ""), "has no section '## [1.2.0] - YYYY-MM-DD'"),
        (DATED.replace("1.2.0", "1x2.0"), "has no section"),
        (DATED.replace("### Added\n", "### Added\n\n- Not released yet.\n"), "has entries under [Unreleased]"),
        ("# Changelog\n\n## [1.2.0] - 2026-01-31\n\n## [Unreleased]\n\n- x\n", "has entries under [Unreleased]"),
    ],
)
def test_other_changelogs_are_not(changelog: str, problem: str) -> None:
    (found,) = release.problems("1.2.0", changelog)
    assert problem in found


def test_the_changelog_describes_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## \[{re.escape(version)}\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_workflows_test_every_supported_python() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [one.rsplit(" ", 1)[1] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == supported


def test_workflows_name_targets_and_folders_that_exist() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text()
        assert yaml.safe_load(text)["jobs"]
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets), workflow.name
        assert [
            name for name in re.findall(r"\b((?:tests|examples)/[\w/.]+)", text) if not (ROOT / name).exists()
        ] == []


def test_hooks_run_what_exists() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    named = [word for hook in local["hooks"] for word in hook["entry"].split() if word.startswith("tests/")]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
