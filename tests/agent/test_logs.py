"""What a job printed, whole lines, each with the name of its task."""

from __future__ import annotations

from pathlib import Path

from fedsched.agent.logs import read_logs


def test_the_logs_of_all_tasks_are_read_to_their_end(tmp_path: Path) -> None:
    one, two = tmp_path / "worker-0.log", tmp_path / "ps-0.log"
    one.write_bytes(b"first\nno newline at the end")
    two.write_bytes(b"ready\n")
    text = b"".join(piece.data for piece in read_logs(lambda: (one, two), lambda: False, False, {}))
    assert text == b"worker-0 | first\nworker-0 | no newline at the end\nps-0 | ready\n"


def test_following_brings_what_is_printed_later_and_ends_with_the_job(tmp_path: Path) -> None:
    """Half a line must not be shown as one, and the end of the log must not be lost."""
    log = tmp_path / "worker-0.log"
    log.write_bytes(b"step 1\nste")
    live = True
    chunks = (piece.data for piece in read_logs(lambda: (log,), lambda: live, True, {}))
    assert next(chunks) == b"worker-0 | step 1\n"
    with log.open("ab") as file:
        file.write(b"p 2\nlast")
    found = next(chunk for chunk in chunks if chunk)
    assert found == b"worker-0 | step 2\n"
    live = False
    assert b"".join(chunks) == b"worker-0 | last\n"


def test_lines_stay_whole_in_logs_of_any_length(tmp_path: Path) -> None:
    """A line that is shown as two is no record to whoever reads it with a program."""
    log = tmp_path / "worker-0.log"
    text = b"".join(b"%d %s\n" % (n, b"x" * (n * 997 % 4000)) for n in range(500))
    log.write_bytes(text)
    found = b"".join(piece.data for piece in read_logs(lambda: (log,), lambda: False, False, {}))
    assert found == b"".join(b"worker-0 | %s\n" % line for line in text.splitlines())


def test_a_reader_who_comes_back_after_any_piece_gets_the_rest(tmp_path: Path) -> None:
    """Lines are broken off anywhere: at the end of what was printed yet, and in the middle of very long ones."""
    logs = {}
    for attempt, task, text in [(1, "ps-0", b"a\n"), (1, "worker-0", b"b" * 600_000 + b"\nc\nd"), (2, "ps-0", b"e\nf")]:
        path = tmp_path / f"attempt-{attempt}" / "logs" / f"{task}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        logs[path] = text
    whole = list(read_logs(lambda: list(logs), lambda: False, False, {}))
    for count in range(len(whole) + 1):
        read = {piece.file: piece.offset for piece in whole[:count]}
        rest = read_logs(lambda: list(logs), lambda: False, False, read)
        assert [*whole[:count], *rest] == whole
