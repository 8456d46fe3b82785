"""The GPU's kernels: run for real where there is a GPU, else in Triton's interpreter on CPU tensors.

Triton must be told to interpret before anything imports it: TRITON_INTERPRET=1 python -m pytest tests/ops/gpu.
Without that variable the tests here are left out; tests/ops/test_gpu_interpreted.py runs them in a process with it.
"""

import os
import threading
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
MANY_CASES = 4

if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
elif not ON_GPU:
    from tests.ops.gpu.launches import note_launches, write_launches
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patched(tensor, scope):
        # Triton 3.6 asks NumPy for the number in an array of one, which NumPy 2.4 refuses.
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def _scan(self, parts):
        """Scan a whole slice at a time, where the interpreter takes one number after another."""
        slices = [np.moveaxis(part.handle.data, self.axis, 0) for part in parts]
        kinds = [part.dtype for part in parts]
        running = [[one[0]] for one in slices]
        for i in range(1, len(slices[0])):
            arguments = [values[-1] for values in running] + [one[i] for one in slices]
            result = self.combine_fn.fn(*(self.to_tensor(a, k) for a, k in zip(arguments, kinds * 2, strict=True)))
            for values, value in zip(running, result, strict=True):
                values.append(value.handle.data)
        whole = [np.stack(values, self.axis) for values in running]
        return [self.to_tensor(values, kind) for values, kind in zip(whole, kinds, strict=True)]

    _patch_lang, _numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    _modules, _kinds = set(), {}

    def _patch_once(fn):
        """Leave Triton's language patched: doing so at every launch and call took half the time of these tests."""
        if id(fn.__globals__) not in _modules:
            _modules.add(id(fn.__globals__))
            _patch_lang(fn)
        return interpreter._LangPatchScope()  # an empty one, which restores nothing

    def _numpy_type_once(kind):
        name = kind.scalar.name
        if name not in _kinds:
            _kinds[name] = _numpy_type(kind)
        return _kinds[name]

    _launch, _one_at_a_time = interpreter.GridExecutor.__call__, threading.RLock()

    def _launch_alone(self, *args, **kwargs):
        """Keep the interpreter, whose place in the grid is one variable for all threads, to one launch at a time."""
        with _one_at_a_time:
            return _launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = _launch_alone
    interpreter._patch_lang_tensor = _patched
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _numpy_type_once
    interpreter.ScanOps.generic_scan = _scan
    # Of an operation on integers, Triton computes whether it overflows and then leaves the answer, since the options of
    # the interpreter are not those of debugging: half the time of an operation.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *given: None
    TritonSemantic.computation_type_impl = cache(TritonSemantic.computation_type_impl)

    if noted := os.environ.get("VIVIANE_TEST_LAUNCHES"):  # tests/ops/test_gpu_kernels_compile.py reads them
        note_launches(interpreter.InterpretedFunction)

        def pytest_sessionfinish() -> None:
            write_launches(Path(noted))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


def pytest_collection_modifyitems(config, items):
    """Leave slow tests, and cases of tests with many, out of the interpreter, where slow tests are left out elsewhere.

    Half of four to fifteen cases stay, a quarter of more. Of two values, or of four, that take turns each comes as
    often then: the number of a case that stays has an even count of set bits, or digits to base 4 whose sum is a
    multiple of 4.
    """
    if ON_GPU or not os.environ.get("VIVIANE_TEST_FEW"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    kept, dropped, counts = [], slow, Counter(_function(item) for item in items)
    numbers = Counter()
    for item in items:
        if item in slow:
            continue
        number = numbers[_function(item)]
        numbers[_function(item)] += 1
        (kept if _stays(number, counts[_function(item)]) else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def _stays(number, count):
    if count < MANY_CASES:
        return True
    if count < 4 * MANY_CASES:
        return number.bit_count() % 2 == 0
    return sum(number >> shift & 3 for shift in range(0, number.bit_length(), 2)) % 4 == 0


def _function(item):
    return item.path, getattr(item, "originalname", item.name)
