"""What clusters have seen adds up exactly, whatever becomes of the messages, and nonsense is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace
from numpy.typing import NDArray

from fedsched.core.ids import ClusterName
from fedsched.core.speeds import LOG_MAX, SpeedCell, SpeedStatistics, SpeedSums, observed
from fedsched.errors import CorruptCheckpoint
from fedsched.policy import speed_pool
from fedsched.policy.speed_checkpoint import SpeedCheckpoint
from fedsched.policy.speed_pool import CELLS_MAX, STATISTICS, Part, Pool, part_of

CELLS = [SpeedCell(kind, "", workers, 0, 0) for kind in ("a", "b") for workers in (1, 2, 4)]


def seen(*speeds: float, cell: SpeedCell = CELLS[0]) -> SpeedStatistics:
    statistics = SpeedStatistics()
    for speed in speeds:
        statistics.add(cell, observed(speed))
    return statistics


def part(statistics: SpeedStatistics, *, epoch: int = 1, term: int = 1, number: int = 1) -> Part:
    return Part(epoch, term, number, 600.0, statistics)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[ClusterName, Part]]:
    """What the agents of some clusters give, one after the other: each sees more and more, and some begin anew."""
    given_: list[tuple[ClusterName, Part]] = []
    for name in ("east", "north", "west")[: draw(st.integers(1, 3))]:
        epoch, number, statistics = 1, 0, SpeedStatistics()
        for term in range(1, draw(st.integers(1, 3)) + 1):
            if draw(st.booleans()):
                epoch, statistics = term, SpeedStatistics()
            for _ in range(draw(st.integers(0, 3))):
                statistics = statistics.merged([seen(draw(st.floats(0.01, 100)), cell=draw(st.sampled_from(CELLS)))])
                number += 1
                given_.append((ClusterName(name), part(statistics, epoch=epoch, term=term, number=number)))
    return given_


@given(histories(), st.randoms(use_true_random=False))
def test_late_repeated_and_lost_updates_give_the_same_sums(
    history: list[tuple[ClusterName, Part]], chance: object
) -> None:
    """Every link loses, delays and repeats; sums that depend on it would drift apart from what was seen."""
    newest: dict[tuple[ClusterName, int], Part] = {}
    for cluster, one in history:
        newest[cluster, one.epoch] = one
    expected = SpeedStatistics().merged(one.statistics for one in newest.values())

    # Anything may get lost but what each cluster gave last; all that comes may come again, at any time.
    last = [(cluster, one) for (cluster, _), one in newest.items()]
    came = [entry for entry in history if chance.random() < 0.6] * 2 + last  # type: ignore[attr-defined]
    chance.shuffle(came)  # type: ignore[attr-defined]
    pool = Pool()
    for entry in came:
        pool = pool.merged([entry])

    assert pool.total == expected
    assert pool.digest == Pool().merged(reversed(came)).digest == pool.merged(came).digest
    assert speed_pool.from_bytes(pool.to_bytes()).digest == pool.digest


def test_of_a_cluster_that_loses_its_memory_again_and_again_the_newest_epochs_are_kept() -> None:
    """Bounded, whatever happens to an agent's disk."""
    parts = [(ClusterName("east"), part(seen(1.0 * epoch), epoch=epoch, term=epoch)) for epoch in range(1, 8)]
    assert sorted(epoch for _, epoch in Pool().merged(parts).parts) == [5, 6, 7]
    assert Pool().merged(parts).digest == Pool().merged(reversed(parts)).digest


def test_an_agent_that_came_back_with_less_is_believed() -> None:
    """A later term knows better what the cluster has seen, even where it kept less of it."""
    before, after = part(seen(1.0, 2.0), term=1, number=9), part(seen(1.0), term=2, number=3)
    for order in ([before, after], [after, before]):
        pool = Pool().merged((ClusterName("east"), one) for one in order)
        assert pool.total == seen(1.0)


CELL, SUMS = CELLS[0], observed(2.0)


@pytest.mark.parametrize(
    ("cell", "sums", "why"),
    [
        (CELL, replace(SUMS, count=-3), "-3 observations"),
        (CELL, replace(SUMS, count=0), "0 observations"),
        (CELL, replace(SUMS, total=41 * LOG_MAX), "the mean logarithm"),
        (CELL, replace(SUMS, squares=0), "its sum of squares"),
        (replace(CELL, workers=0), SUMS, "0 workers"),
        (replace(CELL, ps=-1), SUMS, "-1 parameter servers"),
        (replace(CELL, period=-1), SUMS, "period -1"),
        (replace(CELL, job_type="x" * 1000), SUMS, "longer than 200 letters"),
    ],
)
def test_what_nobody_can_have_seen_is_refused_with_the_reason(cell: SpeedCell, sums: SpeedSums, why: str) -> None:
    """One cluster's broken agent must not teach all the others."""
    with pytest.raises(ValueError, match=why):
        part_of({STATISTICS: part(SpeedStatistics([(cell, sums)])).to_array()})


def test_an_update_that_is_too_large_damaged_or_of_something_else_is_refused() -> None:
    sound = part(seen(1.0)).to_array()
    assert part_of({STATISTICS: sound}).statistics == seen(1.0)
    many = SpeedStatistics((SpeedCell("a", "", 1 + at % 900, at // 900, 0), SUMS) for at in range(CELLS_MAX + 1))
    flipped = sound.copy()
    flipped[-3] ^= 1
    bad: dict[str, NDArray[Any]] = {
        "5001 cells": part(many).to_array(),
        "digest": flipped,
        "no whole file": sound[:-20],
        "float32": np.zeros((1, 1, 1), np.float32),
        "at most 1048576 bytes": np.zeros(1 << 21, np.uint8),
        "after the term": part(seen(1.0), epoch=7, term=2).to_array(),
        "number is -1": part(seen(1.0), number=-1).to_array(),
    }
    for why, array in bad.items():
        with pytest.raises(ValueError, match=why):
            part_of({STATISTICS: array})
    with pytest.raises(ValueError, match=r"the arrays are policy\.bias"):
        part_of({"policy.bias": sound})


@pytest.mark.parametrize("name", ["epoch", "term", "number", "period_s"])
@pytest.mark.parametrize("value", [None, [1], {"a": 1}, "soon", -1, float("nan"), float("inf")], ids=repr)
def test_whatever_stands_for_a_number_of_an_update_is_refused_with_the_reason(name: str, value: Any) -> None:
    """Sealed properly by somebody's tool: the round goes on with the other clusters' updates."""
    made = {"epoch": 1, "term": 1, "number": 1, "period_s": 600.0, name: value}
    sent = np.frombuffer(SpeedCheckpoint(seen(1.0), made).to_bytes(), np.uint8)
    with pytest.raises(ValueError, match=f"{name} is .*expected"):
        part_of({STATISTICS: sent})


def test_the_largest_update_fits_into_a_message() -> None:
    most = SpeedStatistics(
        (SpeedCell(f"{at % 97:0100d}", "a100", 1 + at % 900, at // 900, 3), SUMS) for at in range(CELLS_MAX)
    )
    assert part_of({STATISTICS: part(most).to_array()}).statistics == most


def test_a_pool_that_is_not_whole_is_one_clear_error(tmp_path: Path) -> None:
    """A version's file lies on a disk for years."""
    data = Pool().merged([(ClusterName("east"), part(seen(1.0, 3.0)))]).to_bytes()
    for spoilt in (data[:-1], data[:100], b"", data[:-5] + b"\x00" + data[-4:], Pool().to_bytes()[:-3]):
        path = tmp_path / "pool"
        path.write_bytes(spoilt)
        with pytest.raises(CorruptCheckpoint, match="no whole file of clusters' statistics"):
            speed_pool.load(path)


def test_a_federation_can_begin_with_statistics_that_no_cluster_gave(tmp_path: Path) -> None:
    SpeedCheckpoint(seen(1.0, 2.0), {"command": "test"}).save(tmp_path / "known")
    assert speed_pool.load(tmp_path / "known").total == seen(1.0, 2.0)
    assert speed_pool.from_bytes(speed_pool.load(tmp_path / "known").to_bytes()).total == seen(1.0, 2.0)
