"""Every error the product reports, each with a stable code, what to try, and the command's exit code.

FedschedError
├── InvalidInput [FS1xx]          exit 2   a file, flag or value is wrong
│   ├── InvalidConfiguration FS101
│   ├── InvalidJobFile       FS102
│   ├── ImpossibleJob        FS103         no cluster can ever hold it
│   └── InvalidTrace         FS104
├── NotFound             FS110    exit 3
├── Conflict             FS201    exit 5   a newer term, another holder, an idempotency key with other contents
│   └── AddressInUse     FS202    exit 5
├── TimedOut             FS210    exit 6
├── Unreachable          FS220    exit 7   a server does not answer
│   └── StoreUnavailable FS221    exit 7
├── VersionSkew          FS230    exit 8
└── Failed               FS300    exit 1   the operation was carried out and did not succeed
    ├── CorruptCheckpoint FS301
    ├── StartFailed       FS302
    └── CorruptRecord     FS303            what etcd or the history holds of something cannot be read
"""

from __future__ import annotations


class FedschedError(Exception):
    """What happened, what was expected (both in the message) and what to try.

    Args:
        message: what happened and what was expected, one or a few lines.
        hint: the next step for the reader; empty where there is none.
    """

    code = "FS000"
    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text}\n  try: {self.hint}" if self.hint else text


class InvalidInput(FedschedError):
    """A value that the user gave cannot be used."""

    code = "FS100"
    exit_code = 2


class InvalidConfiguration(InvalidInput):
    """A configuration file has problems; the message lists all of them with their paths."""

    code = "FS101"


class InvalidJobFile(InvalidInput):
    """A job file has problems; the message lists all of them with their paths."""

    code = "FS102"


class ImpossibleJob(InvalidInput):
    """No cluster of the federation could hold the job's minimum even when empty."""

    code = "FS103"


class InvalidTrace(InvalidInput):
    """A job trace cannot be read at all, or a row of it where rows may not be left out."""

    code = "FS104"


class NotFound(FedschedError):
    """There is no such thing."""

    code = "FS110"
    exit_code = 3


class Conflict(FedschedError):
    """Somebody else holds it, or it changed meanwhile."""

    code = "FS201"
    exit_code = 5


class AddressInUse(Conflict):
    """Another process listens on the address."""

    code = "FS202"


class TimedOut(FedschedError):
    """It took longer than allowed."""

    code = "FS210"
    exit_code = 6


class Unreachable(FedschedError):
    """A server does not answer."""

    code = "FS220"
    exit_code = 7


class StoreUnavailable(Unreachable):
    """etcd does not answer."""

    code = "FS221"


class VersionSkew(FedschedError):
    """The two sides speak different versions; the message says which side to upgrade."""

    code = "FS230"
    exit_code = 8


class Failed(FedschedError):
    """The operation ran and did not succeed."""

    code = "FS300"
    exit_code = 1


class CorruptCheckpoint(Failed):
    """A checkpoint does not match its digest or its schema."""

    code = "FS301"


class StartFailed(Failed):
    """A process did not come up."""

    code = "FS302"


class CorruptRecord(Failed):
    """What is kept under a key of etcd, or of a job in the history, is not what belongs there."""

    code = "FS303"


def of_the_world(problem: OSError) -> Failed:
    """What the operating system refused, as an error for people: a full disk or a missing right is no fault of ours."""
    what = problem.strerror or str(problem)
    return Failed(
        f"{problem.filename}: {what}" if problem.filename else f"the operating system refused: {what}",
        "check the path, its permissions and the free space there",
    )
