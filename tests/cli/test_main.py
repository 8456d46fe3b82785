import subprocess
import sys

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
