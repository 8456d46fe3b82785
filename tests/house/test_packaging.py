"""The page on the package index has links that hold there; the install page names every extra; pages can be edited."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOOK = "import sys; from setuptools.build_meta import *; prepare_metadata_for_build_wheel(sys.argv[1])"


def built_metadata(folder: Path, repository: str) -> Message:
    """Build the metadata of the wheel, as pip does, from the files that matter to it."""
    source = folder / "source"
    (source / "src" / "viviane").mkdir(parents=True)
    (source / "src" / "viviane" / "__init__.py").touch()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", HOOK, str(folder / "made")]
    environment = {**os.environ, "VIVIANE_REPOSITORY": repository}
    (folder / "made").mkdir()
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "made").glob("*.dist-info/METADATA")
    return message_from_string(file.read_text())


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page)


def test_links_of_the_index_page_lead_into_the_repository(tmp_path: Path) -> None:
    made = built_metadata(tmp_path, "https://example.org/owner/name/")
    assert made["Description-Content-Type"] == "text/markdown"
    found = links(str(made.get_payload()))
    start = f"https://example.org/owner/name/blob/v{PROJECT['version']}/"
    files = [one.removeprefix(start) for one in found if one.startswith(start)]
    assert "docs/how-to/cli.md" in files
    assert len(files) == len([one for one in links((ROOT / "README.md").read_text()) if ":" not in one])
    assert [one for one in files if not (ROOT / one.partition("#")[0]).exists()] == []
    assert all(re.match("https?://|#", one) for one in found)
    assert f"Source, {start.partition('/blob')[0]}" in made.get_all("Project-URL", [])


def test_without_a_repository_the_index_page_has_no_links_to_files(tmp_path: Path) -> None:
    made = built_metadata(tmp_path, "")
    page = str(made.get_payload())
    assert "The settings, changing one for a run, and resuming: from the command line." in page
    assert all(re.match("https?://|#", one) for one in links(page))
    assert made.get_all("Project-URL") is None


def test_the_install_page_names_every_extra() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE))))
    assert named == set(PROJECT["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repository", "link"),
    [
        ("", ""),
        ("https://github.com/owner/name", "https://github.com/owner/name/edit/main/docs/index.md"),
        ("https://example.org/owner/name", ""),
    ],
)
def test_pages_have_an_edit_link_where_the_repository_is_known(tmp_path: Path, repository: str, link: str) -> None:
    pytest.importorskip("mkdocs", reason="the documentation's tools are in the extra 'docs'")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "docs_source.py", tmp_path / ".ci")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n")
    (tmp_path / "docs" / "two.md").write_text("# Two\n")
    whole = (ROOT / "mkdocs.yml").read_text()
    kept = re.split(r"^(?=plugins:|markdown_extensions:)", whole, flags=re.MULTILINE)[0]
    (tmp_path / "mkdocs.yml").write_text(kept + "nav: [index.md, two.md]\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "VIVIANE_REPOSITORY": repository}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert re.findall(r'href="([^"]*/edit/[^"]*)"', page) == ([link] if link else [])
    assert re.findall(r'rel="next" href="([^"]+)"', page) == ["two/"]
    assert 'class="md-footer__link md-footer__link--next"' in page
