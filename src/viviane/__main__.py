"""The command `viviane`, also as `python -m viviane`."""

from __future__ import annotations

import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it; Ctrl-C during the import ends without a traceback, too."""
    try:
        from viviane.cli.main import main as run
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one kills the process
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
