"""Files are whole or as they were."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fedsched.files import whole, write_whole


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
