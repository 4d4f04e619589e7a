"""Ends a benchmark's job when the benchmark itself has ended, however it ended.

Its standard input is the benchmark's: it closes when that process is gone, a kill -9 included. Then no process of the
job's executor is left running, and its folder goes.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fedsched.executor.local import shut_down


def main() -> None:
    """Wait for the end of standard input, then clean up the folder that the command line names."""
    sys.stdin.buffer.read()
    root = Path(sys.argv[1])
    if root.is_dir():
        shut_down(root / "cluster", grace_s=1.0)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
