"""Files are whole or as they were."""

from __future__ import annotations

import os
import resource
import threading
from functools import partial
from pathlib import Path

import pytest

from fedsched.errors import Conflict, Failed, InvalidInput
from fedsched.files import alone, refuse_clashes, sweep, whole, write_all, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool) -> None:
    """A leftover would be taken for a record by whoever lists the folder."""
    path = tmp_path / "record.json"
    for data in (b"first", b"second"):
        write_whole(path, data, durable=durable)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The old record of an agent is better than none."""
    path = tmp_path / "record.json"
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(OSError, match=r"record\.json"):
        write_whole(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_once_never_mix(tmp_path: Path) -> None:
    """Each attempt's thread and the launcher write beside each other."""
    path = tmp_path / "record.json"
    texts = [bytes([65 + number]) * 50_000 for number in range(4)]

    def write(text: bytes) -> None:
        for _ in range(50):
            write_whole(path, text)
            assert path.read_bytes() in texts

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert path.read_bytes() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_written_piece_by_piece_is_there_when_it_is_whole(tmp_path: Path) -> None:
    """A reader must find the old file or the new one, also while a long one is written."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    with whole(path) as file:
        file.write(b"n")
        assert path.read_bytes() == b"old"
        file.write(b"ew")

    assert path.read_bytes() == b"new"
    with pytest.raises(TypeError), whole(path) as file:
        file.write("no bytes")  # type: ignore[call-overload]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    """Results that are linked elsewhere must arrive there."""
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """Who replaced /dev/null by a file would break the machine for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"said")
    assert os.read(reader, 100) == b"said"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_two_files_of_one_thread_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole(path) as one, whole(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_would_go_over_each_other_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """An import that is told to write over what it reads must not eat it."""
    trace, out = tmp_path / "trace.csv", tmp_path / "out.csv"
    trace.touch()
    refuse_clashes([trace], [out])
    for read, written, why in (
        ([trace], [tmp_path / "." / "trace.csv"], "would be written over"),
        ([trace], [out, out], "would be written over"),
        ([trace], [tmp_path], "is a folder"),
        ([trace], [tmp_path / "none" / "out.csv"], "there is no folder"),
    ):
        with pytest.raises(InvalidInput, match=why):
            refuse_clashes(read, written)


def test_a_disk_that_is_full_in_the_middle_is_told_with_the_name_that_was_asked_for(tmp_path: Path) -> None:
    """The system says only that there is no space, not for what."""
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))
    try:
        with pytest.raises(OSError, match="weights"):
            write_whole(path, bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    """All of them come from one run, which may have taken hours."""
    paths = [tmp_path / name for name in ("none/a", "b", "none/c", "d")]
    with pytest.raises(Failed, match=r"none/a.*\n.*none/c"):
        write_all(*(partial(write_whole, path, b"data") for path in paths))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]


def test_two_are_never_alone_with_a_file_and_whoever_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    """Two trainings into one file would leave the weights of the one with the state of the other."""
    path = tmp_path / "weights.state"
    with alone(path):
        with pytest.raises(Conflict, match=r"another process is writing .*weights"), alone(path):
            pass
        with alone(tmp_path / "other"):
            pass
    assert not list(tmp_path.iterdir())
    (tmp_path / ".weights.state.lock").touch()  # as it lies there after a kill
    with alone(path):
        pass
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_swept_away_and_nothing_else(tmp_path: Path) -> None:
    """Every kill while a large file is written would leave as much again, for ever."""
    file = tmp_path / "f.state"
    kept = ["f.state", ".f.state.lock", ".f.state.12", ".g.state.1.2.3", "f.state.1.2.3", ".f.state.1.2.x"]
    for name in [*kept, ".f.state.1.2.3", ".f.state.99.140481401056128.0"]:
        (tmp_path / name).write_text("")
    sweep(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
