"""Mutated scripts of HugeCTR's and SOK's form: success, an error in the script's own line, or a VivianeError.

Scripts run in this process with few iterations. A case is drawn from a seed, which is in the message of a failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_counts import tell
from script_mutations import attribute_names, mutate_script
from test_mutated_commands import TooLong, within

from viviane.compat.hugectr import run_script
from viviane.core.errors import ConfigError
from viviane.core.machine_errors import as_own_error

HERE = Path(__file__).parent.parent
SLOW_CASES = int(os.environ.get("VIVIANE_FUZZ_CASES", "10000"))
MOST_SECONDS = 15
CONTROL_EVERY = 50
MOST_ADDRESSES = 1 << 44  # dynamic tables reserve addresses for as many rows as they may ever have
FEWER = (
    (r"max_iter\s*=\s*\d+", "max_iter=6"), (r"display\s*=\s*\d+", "display=3"),
    (r"num_epochs\s*=\s*\d+", "num_epochs=1"), (r"eval_interval\s*=\s*\d+", "eval_interval=3"),
    (r"snapshot\s*=\s*\d+", "snapshot=6"),
    (r"(_dense|_sparse|_opt_sparse|_opt_dense)_\d+\.model", r"\1_6.model"), (r"range\(\d{2,}\)", "range(6)"),
)  # fmt: skip
Run = Callable[[Path], None]


def shortened(file: Path) -> str:
    """Return a script with a few iterations."""
    text = file.read_text(encoding="utf-8")
    for pattern, other in FEWER:
        text = re.sub(pattern, other, text)
    return text


def as_notebook(text: str, rng: random.Random) -> str:
    """Return a script as the cells of a notebook, one of which may be written to a file and run by the shell."""
    parts = text.split("\n\n")
    cells = (
        ["\n\n".join(parts[:2]), *parts[2:]] if rng.random() < 0.5 else [f"%%writefile s.py\n{text}", "!python s.py"]
    )
    made = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def outcome(file: Path, run: Run, told: str) -> str:
    """Run one script in its folder; returns how it ended."""
    error: BaseException | None = None
    shown = io.StringIO()
    try:
        with (
            contextlib.chdir(file.parent), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown),
            within(MOST_SECONDS, MOST_ADDRESSES),
        ):  # fmt: skip
            run(file)
    except TooLong:
        return "too long"
    except SystemExit:
        return "exit"
    except BaseException as raised:
        error = raised
    if error is None:
        return "accepted"
    own = as_own_error(error)
    if own is not None:
        return type(own).__name__
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if last.is_relative_to(HERE.parent / "src"):
        text = "".join(traceback.format_exception(error))[-3000:]
        pytest.fail(f"{told}: {text}\n{file.read_text(errors='replace')}")
    return "the script's own error"


def fuzz(
    files: list[Path],
    run: Run,
    folder: Path,
    cases: int,
    start: int = 0,
    notebooks: float = 0.2,
    control_every: int = CONTROL_EVERY,
) -> Counter[str]:
    """Run mutations of scripts in turn; returns how often each outcome occurred.

    A case may leave the process in a state in which every later script is refused, and nothing more is tested. So an
    unchanged script runs now and then, and must succeed.
    """
    texts = [shortened(file) for file in files]
    names = sorted({name for text in texts for name in attribute_names(text)})
    found: Counter[str] = Counter()
    unchanged = folder / "unchanged.py"
    unchanged.write_text(texts[0])
    with contextlib.chdir(folder):
        run(unchanged)  # compiles kernels, which may take longer than a case
    for seed in range(start, start + cases):
        rng = random.Random(seed)
        place = folder / "one"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            text = mutate_script(texts[seed % len(texts)], rng, names)
        except (ValueError, SyntaxError):
            found["no program"] += 1
            continue
        is_notebook = rng.random() < notebooks
        script = place / ("s.ipynb" if is_notebook else "s.py")
        script.write_text(as_notebook(text, rng) if is_notebook else text, errors="replace")
        found[outcome(script, run, f"seed {seed} of {files[seed % len(files)].name}")] += 1
        if (seed - start + 1) % control_every == 0:
            ended = outcome(unchanged, run, "unchanged")
            assert ended == "accepted", f"an unchanged script after seeds {seed - control_every + 1} to {seed}: {ended}"
    return found


def programs(*names: str) -> list[Path]:
    """Programs of HugeCTR's form, all of them without names."""
    every = sorted((HERE / "compat/programs").glob("*.py"))
    return [file for file in every if not names or file.stem in names]


def sok_script(file: Path) -> None:
    """Run a script of SOK's form."""
    from viviane.tensorflow.run import run_script as run_sok

    run_sok(file, [str(file.parent / "tables")])


def test_mutated_scripts_end_with_success_or_an_error_of_ours(tmp_path: Path) -> None:
    found = fuzz(programs("dcn", "deepfm", "mmoe", "wdl"), run_script, tmp_path, 16, control_every=16)
    assert found.total() == 16
    assert len(found) > 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hugectr.Layer_t.Relu", r"line 2[\s\S]*Layer_t\.Relu[\s\S]*did you mean 'ReLU'"),
        ("hugectr.CreateSolvr()", r"hugectr\.CreateSolvr[\s\S]*did you mean 'CreateSolver'"),
        ("hugectr.CreateSolver().learning_rate", r"value: +'CreateSolver\.learning_rate'|Solver\.learning_rate"),
        ("hugectr.Model(hugectr.CreateSolver(), xx=3)", "do not fit the call"),
        ("hugectr.Model(hugectr.CreateSolver()).summary(3)", "do not fit the call"),
        ("hugectr.Model(hugectr.CreateSolver()).eval()", "not compiled"),
        ("hugectr.Model(hugectr.CreateSolver()).export_predictions('a', 'b')", "not compiled"),
        ("hugectr.DataReaderSparseParam('d', 1, True, 10**300).nnz", "slot_num is out of range"),
        ("hugectr.Model(hugectr.CreateSolver()).train()", "not compiled"),
        ("hugectr.DenseLayer(hugectr.Layer_t.ReLU, ['a'], [])", "at least one tensor"),
        (
            "hugectr.Input(1, 'y', 0, 'd', 3)",
            r"data_reader_sparse_param_array[\s\S]*what DataReaderSparseParam returns",
        ),
        ("hugectr.DataReaderParams('x', 'y')", r"DataReaderType_t\.Norm"),
        ("hugectr.Input(1, (), 0, 'd', [])", r"Input, label_name[\s\S]*value: +'?\[\]"),
        ("hugectr.Input(1, ['y'], 0, 'd', [])", r"name of a label is a text[\s\S]*Input, label_name"),
        ("hugectr.Input(1, 'y', 0, ['d'], [])", r"Input, dense_name[\s\S]*a text"),
        (
            "hugectr.SparseEmbedding(hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash, 1e300, 2, 'sum', 'a', 'b')",
            "workspace_size_per_gpu_in_mb is out of range",
        ),
        ("hugectr.SparseEmbedding(3, 1, 2, 'sum', 'a', 'b')", r"embedding_type[\s\S]*Embedding_t\."),
        ("hugectr.inference.InferenceModel('x', [])", "what InferenceParams returns"),
        ("hugectr.inference.CreateParameterServer(['a'], [], True)", "one name"),
        ("hugectr.CreateSolver(training_callbacks=[1])", r"on_training_start with 0 argument[\s\S]*value: +1"),
        ("hugectr.CreateSolver(training_callbacks=[hugectr.TrainingCallback])", "an object of it"),
        (
            "class C(hugectr.TrainingCallback):\n  def on_eval_end(self): pass\n"
            "hugectr.CreateSolver(training_callbacks=[C()])",
            r"on_eval_end with 2 argument",
        ),
    ],
)
def test_errors_of_scripts_name_the_line_or_the_argument(line: str, said: str, tmp_path: Path) -> None:
    """These ended in AttributeError, TypeError or IndexError."""
    script = tmp_path / "s.py"
    script.write_text(f"import hugectr, hugectr.inference\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        run_script(script)


def test_names_that_the_script_lacks_itself_stay_its_own_errors(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import hugectr\nassert not hasattr(hugectr, 'x')\n[].hugectr\n")
    with pytest.raises(AttributeError, match="'list' object"):
        run_script(script)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm came in a compiler's callback
def test_many_mutated_scripts(tmp_path: Path) -> None:
    found = fuzz(programs(), run_script, tmp_path, SLOW_CASES, random.SystemRandom().randrange(1 << 40))
    tell("mutated scripts", found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # or in that of a weak reference
def test_many_mutated_scripts_of_sok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # read when tensorflow is imported
    pytest.importorskip("tensorflow")
    files: list[Any] = sorted((HERE / "sok/scripts").glob("*.py"))
    found = fuzz(files, sok_script, tmp_path, SLOW_CASES // 10, random.SystemRandom().randrange(1 << 40), notebooks=0)
    tell("mutated scripts of SOK", found)
