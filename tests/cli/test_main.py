import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane import __main__
from viviane.cli import main
from viviane.core.errors import DataError
from viviane.data import Dataset

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
    listed = [line.split()[1] for line in done.output.splitlines() if line.startswith("│ ") and line[2] != " "]
    assert set(main.COMMANDS) <= set(listed)


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


def test_ctrl_c_during_the_imports_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "viviane.cli.main":
                raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the second one would end the tests
    monkeypatch.setattr(sys, "meta_path", [Pressed(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "viviane.cli.main")
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_kernels_without_a_place_for_machine_code_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise RuntimeError("cannot cache function 'f': no locator available for file 'cpu.py'")

    monkeypatch.setattr(main, "app", refuse)
    monkeypatch.delenv("VIVIANE_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    assert "NUMBA_CACHE_DIR" in capsys.readouterr().err


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


HELP_OF_ALL = """
import sys
from typer.testing import CliRunner
from viviane.cli.main import COMMANDS, app, find_command
for name in COMMANDS:
    for words in ([name], *([name, one] for one in getattr(find_command(name), "commands", ()))):
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, done.output
        loaded = [one for one in ("torch", "numpy", "pyarrow", "pandas", "duckdb", "numba") if one in sys.modules]
        assert not loaded, f"viviane {' '.join(words)} --help imports {', '.join(loaded)}"
"""


def test_no_help_loads_a_large_library() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _processor_time(*arguments: str) -> float:
    """Seconds of processor time of a new interpreter: other processes stretch them less than the time on the wall."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("words", [["doctor"], ["checkpoint", "reshard"]], ids=" ".join)
def test_help_takes_less_than_half_a_second(words: list[str]) -> None:
    """Where the machine is busy, at most 2.5 times what importing the libraries that print it takes (1.7 measured)."""
    tries = []
    for _ in range(5):
        libraries = _processor_time("-c", "import typer.rich_utils, rich.markdown, pydantic.types")
        seconds = _processor_time("-m", "viviane", *words, "--help")
        if seconds < max(0.5, 2.5 * libraries):
            return
        tries.append(f"{seconds:.2f} s beside {libraries:.2f} s of its libraries")
    pytest.fail(f"viviane {' '.join(words)} --help takes {'; '.join(tries)}: see python -X importtime")


def test_no_rows_have_no_figures(tmp_path: Path) -> None:
    words = ["generate", str(tmp_path / "a"), "--rows", "0", "--num-categorical", "1", "--num-dense", "1"]
    done = run(main.app, words)
    assert done.output == f"{tmp_path / 'a'}: 0 rows, columns alone\n"
    assert len(Dataset(tmp_path / "a")) == 0


def test_commands_that_take_long_print_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["generate", str(tmp_path / "a"), "--rows", "200000", "--num-categorical", "1", "--num-dense", "1"]
    assert "train: " not in run(main.app, words).stderr  # it is done before the first ten seconds are over
    monkeypatch.setattr("viviane.cli.work_progress.LINE_S", 0.0)
    lines = run(main.app, [*words, "--overwrite"]).stderr.splitlines()
    assert lines[-1] == "train: 200,000 of 200,000"
    assert len(lines) > 1
    assert run(main.app, ["-q", *words, "--overwrite"]).stderr == ""
