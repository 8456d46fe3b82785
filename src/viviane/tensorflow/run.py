"""`viviane sok script.py`: run a script that imports sparse_operation_kit."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from traceback import format_exception
from types import ModuleType
from typing import Final

from viviane.core.errors import ConfigError, VivianeError
from viviane.core.scripts import checked_script, installed_modules, missing_names_explained, run_as_main
from viviane.embedding.external import LostUpdateError, raised_in
from viviane.tensorflow.host_calls import ANOTHER_OPTIMIZER

_CHILD: Final = Path(__file__).parent / "child"


@contextmanager
def installed() -> Iterator[None]:
    """Let `import sparse_operation_kit` find `viviane.tensorflow` for a block, in child processes too.

    Where Horovod is not installed, `import horovod.tensorflow` finds its calls over torch.distributed.
    """
    from viviane.tensorflow import horovod_keras

    modules = own_modules()
    if find_spec("horovod") is None:
        modules |= horovod_keras.modules()
    with installed_modules(modules, _CHILD):
        yield


def own_modules() -> dict[str, ModuleType]:
    """Return what `import sparse_operation_kit` finds, and `sparse_operation_kit.experiment`, where SOK 2 began."""
    own = importlib.import_module("viviane.tensorflow")
    own.experiment = own  # type: ignore[attr-defined]
    return {"sparse_operation_kit": own, "sparse_operation_kit.experiment": own}


def run_script(script: str | Path, args: Sequence[str] = ()) -> None:
    """Run a script of SOK's as `python script args` would.

    Where the package tf_keras is installed, `tf.keras` is Keras 2, for which SOK's scripts are written, unless
    TF_USE_LEGACY_KERAS says otherwise.

    Raises:
        ConfigError: there is no such script, or it needs a package that is not installed.
        VivianeError: a table's, in place of the error that TensorFlow makes of it in a graph.
    """
    path = checked_script(script)
    if find_spec("tf_keras") is not None and "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    with missing_names_explained(path), _own_errors(), installed():
        run_as_main(path, args)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise errors of tables in place of those that TensorFlow makes of them when a graph calls the host."""
    try:
        yield
    except Exception as error:
        text = str(error)
        own: VivianeError | None = raised_in(text) if type(error).__module__.startswith("tensorflow.") else None
        if own is None and "PyFunc" in text and "XLA" in text:
            own = ConfigError(
                "XLA compiles no lookup: it calls the host", where="tf.function", value="jit_compile=True",
                fix="leave jit_compile out of the step, and give it to a tf.function of the dense layers alone",
            )  # fmt: skip
        if own is None and "partially known TensorShape" in text:
            own = _given_to_another_optimizer(error)
        if own is None:
            raise
        raise own from None


def _given_to_another_optimizer(error: Exception) -> VivianeError | None:
    """Return the error of an optimizer that makes state for a dynamic variable, and needs the rows' number for it."""
    frames = "".join(format_exception(error))
    if "add_slot" not in frames and "add_variable_from_reference" not in frames:
        return None
    said = str(error).rpartition("Error: ")[2].strip()
    return LostUpdateError("another optimizer was given a dynamic variable", value=said, fix=ANOTHER_OPTIMIZER)
