"""The command `viviane`, also as `python -m viviane`."""

from __future__ import annotations

import gc
import signal
import sys

_INTERRUPTED = 130
_REPORT_LEAKS = {"duckdb", "torch", "triton"}
"""Libraries that report at exit what was not freed, by themselves or by what they load."""


def main() -> None:
    """Import the command line, run it, and end the process; Ctrl-C during the import ends without a traceback, too."""
    try:
        from viviane.cli.main import main as run
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one kills the process
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(_INTERRUPTED)
    try:
        run()
    finally:
        if not _REPORT_LEAKS & sys.modules.keys():
            gc.freeze()  # Python's last three collections would take 0.1 s to free what ends with the process


if __name__ == "__main__":
    main()
