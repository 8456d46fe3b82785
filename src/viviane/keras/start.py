"""Import Keras, which needs a backend."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from viviane.core.json_files import read_json_object
from viviane.core.optional import import_triton_first, require

_DEFAULT: Final = "tensorflow"


def load_keras() -> ModuleType:
    """Import Keras, or raise with what to install.

    Keras' own default is TensorFlow. Where KERAS_BACKEND is not set, Keras' settings file names no other backend and
    TensorFlow is not installed, so that `import keras` would fail, the backend is torch, which Viviane needs anyway.

    Raises:
        MissingExtraError: Keras or its backend is not installed.

    Example:
        >>> load_keras().__name__
        'keras'
    """
    if "keras" not in sys.modules and "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None:
        settings = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"
        named = read_json_object(settings).get("backend", _DEFAULT) if settings.is_file() else _DEFAULT
        if named == _DEFAULT:
            os.environ["KERAS_BACKEND"] = "torch"
    import_triton_first()
    return require("keras", extra="keras", purpose="viviane.keras")
