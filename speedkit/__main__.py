"""The command `speedkit`, and `python -m speedkit`."""

import os
import signal
from typing import Any


def main() -> None:
    """Run the command line. Ctrl-C ends its imports, which take seconds, without a traceback."""
    before = signal.signal(signal.SIGINT, leave)
    from speedkit.cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()


def leave(_number: int, _frame: Any) -> None:
    """End this process at once: what an import raises, others may catch."""
    os.write(2, b"speedkit: stopped by SIGINT before anything was done\n")
    os._exit(130)


if __name__ == "__main__":
    main()
