import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane.cli import main
from viviane.core.errors import DataError

run = CliRunner().invoke


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    done = run(main.app, ["docter"])
    assert done.exit_code == 2
    assert "no command 'docter'; did you mean 'doctor'?" in " ".join(done.output.split())


def test_an_unknown_flag_is_refused() -> None:
    done = run(main.app, ["doctor", "--jsn"])
    assert done.exit_code == 2
    assert "--jsn" in done.output


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_of_each_command(name: str) -> None:
    done = run(main.app, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"viviane {name}" in done.output or f" {name} [OPTIONS]" in done.output


def test_help_lists_every_command() -> None:
    done = run(main.app, ["--help"])
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in main.COMMANDS)


def fail() -> None:
    raise DataError("a file is missing", where="train/part-00000.parquet", fix="write it again")


def test_an_error_is_a_message_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "app", fail)
    monkeypatch.delenv("VIVIANE_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message == ("error: a file is missing\n  where:   train/part-00000.parquet\n  do:      write it again\n")


def test_the_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setenv("VIVIANE_TRACEBACK", "1")
    with pytest.raises(DataError):
        main.main()


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m viviane.cli.main doctor --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


def test_the_version_is_printed() -> None:
    from importlib.metadata import version

    done = run(main.app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"viviane {version('viviane')}\n")


def test_quiet_and_verbose_exclude_each_other() -> None:
    done = run(main.app, ["-q", "-v", "doctor"])
    assert isinstance(done.exception, main.ConfigError)


def test_a_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_VIVIANE_COMPLETE": "complete_bash"}
        command = [sys.executable, "-c", "from viviane.cli.main import app; app(prog_name='viviane')"]
        done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.stdout.split()

    assert complete("viviane tr") == ["train", "trace"]
    assert "--run-folder" in complete("viviane train --run")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_no_help_loads_torch(name: str) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from viviane.cli.main import app\n"
        f"assert CliRunner().invoke(app, [{name!r}, '--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    if name in ("train", "doctor", "etl", "compare"):  # one process each takes a second: the usual ones
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        assert "\nimport torch" not in Path(str(importlib.import_module(main.COMMANDS[name]).__file__)).read_text()
