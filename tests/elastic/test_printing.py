"""A script's own lines, on a log that has no room for them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOM_BYTES = 4096
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

SCRIPT = """
import logging, os, sys
from fedsched.elastic import printing

print("before")
printing.lose_what_cannot_be_logged()
printing.lose_what_cannot_be_logged()
assert not printing.complaint()
logging.basicConfig()
for number in range(200):
    print(number, "of many lines that have no room", "x" * 100)
    sys.stderr.write("and more\\n")
    logging.warning("and more")
print("a last one without its end", end="")
with open(sys.argv[1], "w") as told:
    told.write(printing.complaint())
"""


def printed(folder: Path, *options: str, log: Path | None = None) -> tuple[int, str]:
    """How a script ends whose stdout and stderr are a file with little room, and what it complains about."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (log or folder / "log").open("ab") as out:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, usual[1]))
        try:
            command = [sys.executable, *options, "-c", SCRIPT, str(folder / "told")]
            done = subprocess.run(command, stdout=out, stderr=out, env=BUFFERED, timeout=60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    return done.returncode, (folder / "told").read_text()


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "-u"])
def test_lines_without_room_are_lost_and_told_and_end_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A `print` that raises ends days of training, and so does a buffer that cannot be emptied at the very end."""
    code, complaint = printed(tmp_path, *options)
    assert (code, complaint) == (0, "its log cannot be written, what it prints is lost: File too large")
    kept = (tmp_path / "log").read_bytes()
    assert len(kept) == ROOM_BYTES
    assert kept.startswith(b"before\n0 of many lines")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_log_that_was_full_from_the_first_line_on_ends_nothing(tmp_path: Path) -> None:
    """What the interpreter had kept back from before must not come up again when it ends."""
    code, complaint = printed(tmp_path, log=Path("/dev/full"))
    assert code == 0
    assert complaint.endswith("No space left on device")


def test_a_stream_that_is_broken_for_another_reason_raises_as_ever(tmp_path: Path) -> None:
    """Who closes stdout and prints has a fault of his own, and must see it."""
    script = "from fedsched.elastic import printing; printing.lose_what_cannot_be_logged()\n"
    script += (
        "import os, sys\nos.close(1)\ntry:\n    print('lost')\nexcept OSError as problem:\n    os._exit(problem.errno)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert os.strerror(done.returncode) == "Bad file descriptor"
