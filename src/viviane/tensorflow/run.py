"""`viviane sok script.py`: run a script that imports sparse_operation_kit."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from viviane.core.errors import ConfigError, ConfigNotFoundError

_CHILD: Final = Path(__file__).parent / "child"
_PATH: Final = "PYTHONPATH"


@contextmanager
def opened() -> Iterator[None]:
    """Let `import sparse_operation_kit` find `viviane.tensorflow` for a block, in programs it starts too.

    Where Horovod is not installed, `import horovod.tensorflow` finds its calls over torch.distributed.
    """
    from viviane.tensorflow import horovod

    made = {"sparse_operation_kit": importlib.import_module("viviane.tensorflow")}
    if find_spec("horovod") is None:
        made |= horovod.modules()
    before = {name: sys.modules.get(name) for name in made}
    path = os.environ.get(_PATH)
    sys.modules.update(made)
    os.environ[_PATH] = os.pathsep.join([str(_CHILD), *([path] if path else [])])
    try:
        yield
    finally:
        if path is None:
            os.environ.pop(_PATH, None)
        else:
            os.environ[_PATH] = path
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def run_script(script: str | Path, args: Sequence[str] = ()) -> None:
    """Run a script of SOK's as `python script args` would.

    Where the package tf_keras is installed, `tf.keras` is Keras 2, for which SOK's scripts are written, unless
    TF_USE_LEGACY_KERAS says otherwise.

    Raises:
        ConfigError: there is no such script, or it needs a package that is not installed.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigNotFoundError("no such script", value=str(path))
    if find_spec("tf_keras") is not None and "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    argv, search = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(path), *args], [str(path.resolve().parent)]
    try:
        with opened():
            runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        raise ConfigError("the script needs a package that is not installed", where=str(path), value=error.name,
                          fix="install it, or take out what needs it") from error  # fmt: skip
    finally:
        sys.argv, sys.path[:] = argv, search
