"""Becomes another program that is killed when whoever started it ends: `python tied.py PARENT ERRORS PROGRAM...`.

Whoever starts it may have threads, so nothing of Python's can run between the fork and the program (`preexec_fn`): a
fork that meets a lock which another thread held then stands still. Here the program itself asks to be killed, and then
makes way. It imports as little as it can, for it runs before every task that a shepherd starts.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
NOT_STARTED = 127
"""Exit code where the program was not begun, as a shell would give it."""


def main(arguments: list[str]) -> None:
    """Become the program; where that cannot be, write the error's number into the descriptor ERRORS."""
    parent, errors, *program = arguments
    os.set_inheritable(int(errors), False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(NOT_STARTED)  # it has ended already, and would not be told of any more
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; other programs expect the default
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as problem:
        os.write(int(errors), str(problem.errno).encode())
        os._exit(NOT_STARTED)


if __name__ == "__main__":
    main(sys.argv[1:])
