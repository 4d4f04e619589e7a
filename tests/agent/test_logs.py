"""What a job printed, whole lines, each with the name of its task."""

from __future__ import annotations

from pathlib import Path

from fedsched.agent.logs import read_logs


def test_the_logs_of_all_tasks_are_read_to_their_end(tmp_path: Path) -> None:
    one, two = tmp_path / "worker-0.log", tmp_path / "ps-0.log"
    one.write_bytes(b"first\nno newline at the end")
    two.write_bytes(b"ready\n")
    text = b"".join(read_logs(lambda: (one, two), lambda: False, follow=False))
    assert text == b"worker-0 | first\nworker-0 | no newline at the end\nps-0 | ready\n"


def test_following_brings_what_is_printed_later_and_ends_with_the_job(tmp_path: Path) -> None:
    """Half a line must not be shown as one, and the end of the log must not be lost."""
    log = tmp_path / "worker-0.log"
    log.write_bytes(b"step 1\nste")
    live = True
    chunks = read_logs(lambda: (log,), lambda: live, follow=True)
    assert next(chunks) == b"worker-0 | step 1\n"
    with log.open("ab") as file:
        file.write(b"p 2\nlast")
    found = next(chunk for chunk in chunks if chunk)
    assert found == b"worker-0 | step 2\n"
    live = False
    assert b"".join(chunks) == b"worker-0 | last\n"
