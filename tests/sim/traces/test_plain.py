"""The normal form of a trace: what is written is read again, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.sim.traces import plain
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.record import TraceJob
from tests.sim.traces.public import read_all

NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="|"), max_size=8)
JOBS = st.builds(
    TraceJob,
    job_id=NAMES.filter(bool),
    submit_s=st.floats(0, 1e9),
    duration_s=st.floats(1e-3, 3e8),
    num_gpu=st.sampled_from([0.001, 0.46, 1.0, 8.0, 12.0, 1024.0]),
    cluster=NAMES,
    vc=NAMES,
    user=NAMES,
    model=NAMES,
    batch_size=st.none() | st.integers(1, 10**6),
    deadline_s=st.none() | st.floats(0, 1e9),
    weight=st.floats(0, 1e6),
    cpus=st.floats(0, 1e4),
    memory_gib=st.floats(0, 1e6),
    accelerators=st.lists(NAMES.filter(bool), max_size=3).map(tuple),
)


@given(jobs=st.lists(JOBS, min_size=1, max_size=5, unique_by=lambda job: job.job_id), packed=st.booleans())
def test_what_is_written_is_read_again(
    jobs: list[TraceJob], packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An import may lose nothing that a later simulation asks for, not a digit, comma or quote."""
    path = tmp_path_factory.mktemp("round") / ("trace.csv.gz" if packed else "trace.csv")

    assert plain.write(path, jobs) == len(jobs)

    assert read_all(path, TraceFormat.CSV) == jobs


def test_the_same_jobs_are_the_same_bytes_also_when_packed(tmp_path: Path) -> None:
    """A checksum of a trace must not depend on when it was written."""
    jobs = [TraceJob("a", 0, 60, 8), TraceJob("b", 1.5, 60, 0.46)]

    for name in ("one.csv.gz", "two.csv.gz"):
        plain.write(tmp_path / name, jobs)

    assert (tmp_path / "one.csv.gz").read_bytes() == (tmp_path / "two.csv.gz").read_bytes()


def test_an_import_that_breaks_off_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    """A half-written trace would simulate well, and mean nothing."""
    path = tmp_path / "trace.csv"
    path.write_text("what was there")

    def jobs() -> Iterator[TraceJob]:
        yield TraceJob("a", 0, 60, 8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain.write(path, jobs())

    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_no_jobs_make_no_file(tmp_path: Path) -> None:
    """An empty trace is a mistake upstream; nothing may be overwritten with it."""
    assert plain.write(tmp_path / "trace.csv", []) == 0
    assert list(tmp_path.iterdir()) == []
