"""Compile the launches that the interpreter's tests made, for a GPU that is not there: half of the kernels, or all.

    python -m tests.ops.gpu.compiling STAGE LOG FIRST STEP FILE...

Triton gets a driver that only names a GPU, and never launches. STAGE "types" checks types in every variant that is
chosen, which takes hundredths of a second; "code" also makes machine code of one or two variants of each kernel, which
takes ten times as long.
Prints JSON: how many variants were compiled, by kernel, and what did not compile. LOG holds what is in progress, and
what the compiler writes about it, should it end the process.
"""

import importlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.ops.gpu.launches import stand_in, with_bfloat16
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

Launch = dict[str, Any]
TARGET = GPUTarget("cuda", 90, 32)
_TOLD = 2  # launches of a kernel whose faults are told in full
WIDE_LOADS = re.compile(r"ld\.global\S*\.v[248]\.|cp\.async\.cg\.")  # the latter moves 16 bytes to shared memory
SHARED_BYTES = 227 * 1024  # of one block, the most that CUDA gives on this GPU


class _NamesTheGpu:
    """A driver for compiling alone."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _TypesHold(Exception):
    """Ends a compilation after its first stage."""


def reason_against() -> str | None:
    """Return why Triton cannot compile for the target here, or None."""
    if "nvidia" not in backends:
        return f"this build of Triton compiles for {', '.join(backends) or 'no device'} alone"
    try:
        knobs.nvidia.ptxas.path  # noqa: B018 - it is looked for when it is requested
    except RuntimeError as error:
        return f"Triton finds no assembler: {error}"
    return None


def read_launches(files: list[Path]) -> dict[str, list[Launch]]:
    """Return the distinct launches by kernel, those of float16 also as bfloat16."""
    noted = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    found: dict[str, list[Launch]] = {}
    for line in sorted({json.dumps(one, sort_keys=True) for one in noted + with_bfloat16(noted)}):
        launch = json.loads(line)
        found.setdefault(launch["kernel"], []).append(launch)
    return found


def choose(launches: list[Launch]) -> list[Launch]:
    """Choose launches that have each number at least once, and each combination of types, flags and what is None."""
    traits = [_traits(one["given"]) for one in launches]
    left, chosen = set().union(*traits), []
    while left:
        best = max(range(len(launches)), key=lambda i: len(traits[i] & left))
        left -= traits[best]
        chosen.append(launches[best])
    return chosen


def _traits(given: dict[str, Any]) -> set[Any]:
    numbers = {(name, value) for name, value in given.items() if _is_number(value)}
    return numbers | {tuple((name, _kind(value)) for name, value in sorted(given.items()) if not _is_number(value))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    """Name a value, a tuple by the kinds of its members however many they are."""
    if isinstance(value, dict) and "tuple" in value:
        return f"({', '.join(sorted({'number' if _is_number(one) else _kind(one) for one in value['tuple']}))})"
    return json.dumps(value)


def largest_of_each_width(launches: list[Launch]) -> list[Launch]:
    """Return the launch of most numbers at once that has bfloat16, and that which has not; wide ones before others."""
    short = [one for one in launches if '"bfloat16"' in json.dumps(one)]
    parts = (short, [one for one in launches if one not in short])
    return [max(part, key=lambda one: (_is_wide(one), _size(one))) for part in parts if part]


def _is_wide(launch: Launch) -> bool:
    """Whether each thread is to load several numbers at once."""
    return launch["given"].get("wide") is True


def _size(launch: Launch) -> int:
    return math.prod(value for value in launch["given"].values() if _is_number(value) and value > 0)


def compile_launch(launch: Launch, log: Path, *, whole: bool) -> str | None:
    """Compile for the target, or check types alone; return what is wrong.

    Args:
        launch: as noted.
        log: rewritten.
        whole: whether to continue to machine code.
    """
    module, _, name = launch["kernel"].rpartition(".")
    named = ", ".join(f"{key}={_shown(value)}" for key, value in {**launch["given"], **launch["options"]}.items())
    log.write_text(f"{launch['kernel']} does not compile for sm_{TARGET.arch}\n  launched with {named}\n")
    knobs.runtime.add_stages_inspection_hook = None if whole else _stop_after_types
    kernel = getattr(importlib.import_module(module), name)
    given = {key: stand_in(value) for key, value in launch["given"].items()}
    try:
        compiled = kernel.run(grid=(1,), warmup=True, **given, **launch["options"])
    except _TypesHold:
        return None
    except Exception as error:  # whatever the compiler raises is the finding
        words, cause = "", error
        while cause is not None:
            words, cause = f"{words}{type(cause).__name__}: {cause}\n", cause.__cause__
        return log.read_text() + words
    if compiled.metadata.shared > SHARED_BYTES:
        return f"{log.read_text()}{compiled.metadata.shared} bytes of shared memory, {SHARED_BYTES} at most"
    if whole and _is_wide(launch) and not WIDE_LOADS.search(compiled.asm["ptx"]):
        return f"{log.read_text()}its threads load one number at a time, though addresses allow more"
    return None


def _stop_after_types(_backend=None, stages=None, *_others):
    """Leave Triton its first stage; without arguments Triton asks for a key of its cache."""
    if stages is None:
        return "types", "types"

    def stop(*_):
        raise _TypesHold

    for stage in list(stages)[1:]:
        stages[stage] = stop
    return None


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    if "pointer" in value:
        return f"*{value['pointer']}{'' if value['aligned'] else ' (unaligned)'}"
    if "tuple" in value:
        return f"({', '.join(_shown(one) for one in value['tuple'])})"
    if "function" in value:
        return str(value["function"])
    return f"tiles {value['block']} of {value['tiles']}" if "tiles" in value else value["kind"]


def main(stage: str, log: Path, first: int, step: int, files: list[Path]) -> None:
    """Compile every step-th kernel from a first one on, and print what came of it."""
    if reason := reason_against():
        print(json.dumps({"reason": reason}))
        return
    log.touch()
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)  # MLIR writes what is wrong there, and raises no word of it
    driver.set_active(_NamesTheGpu())
    chosen = {kernel: choose(launches) for kernel, launches in read_launches(files).items()}
    kernels = sorted(chosen, key=lambda kernel: -len(chosen[kernel]))[first::step]
    faults = []
    for kernel in kernels:
        found = [compile_launch(one, log, whole=False) for one in chosen[kernel]]
        if stage == "code" and not any(found):  # else that is enough to mend
            found = [compile_launch(one, log, whole=True) for one in largest_of_each_width(chosen[kernel])]
        wrong = [fault for fault in found if fault]
        faults += wrong[:_TOLD]
        if wrong[_TOLD:]:
            faults.append(f"{kernel}: {len(wrong) - _TOLD} launches more do not compile")
    print(json.dumps({"compiled": {kernel: len(chosen[kernel]) for kernel in kernels}, "faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), [Path(file) for file in sys.argv[5:]])
