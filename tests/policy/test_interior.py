"""Gavel's shares: what its own solver answered, what cannot be bettered, and what happens where no path leads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedsched.policy import interior
from fedsched.policy.gavel import _corner, greatest_least
from tests.policy import gavel_rounds
from tests.policy.gavel_rounds import GPUS_PER_SERVER, KINDS, SERVERS

ROOMS = np.array([[float(SERVERS[kind] * GPUS_PER_SERVER)] for kind in KINDS])


@pytest.fixture(scope="module")
def answers() -> list[tuple[bool, list[int], np.ndarray]]:
    """Whether types count by speed, the jobs of Gavel's trace, and the shares that its program has for them.

    Recorded from ECOS 2.0.14, to which CVXPY hands the program of Gavel's `max_min_fairness.py`.
    """
    with gzip.open(Path(__file__).with_name("gavel_shares_by_ecos.jsonl.gz"), "rt") as file:
        rows = [json.loads(line) for line in file]
    found = []
    for row in rows:
        way, _, jobs = row["jobs"].partition(":")
        found.append((way == "aware", [int(number) for number in jobs.split(",")], np.array(row["shares"])))
    return found


def test_the_shares_are_those_that_gavels_solver_returns(
    golden_dir: Path, data_dir: Path, answers: list[tuple[bool, list[int], np.ndarray]]
) -> None:
    """Where many shares are optimal the solver's choice decides who runs where, round after round."""
    table = gavel_rounds.read_speeds(data_dir / "gavel" / "simulation_throughputs.json.gz")
    trace = gavel_rounds.read_trace(golden_dir / "gavel" / "max_min_fairness.trace")
    worst = 0.0
    for aware, numbers, expected in answers:
        jobs = [trace[number] for number in numbers]
        speeds = np.array([[table[kind, job.job_type, job.gpus] for kind in KINDS] for job in jobs])
        if not aware:
            speeds = np.ones_like(speeds)
        gangs = np.array([[float(job.gpus)] for job in jobs])
        worth = speeds * gangs / (speeds @ (ROOMS / ROOMS.sum()))
        able = np.ones(speeds.shape, dtype=np.bool_)
        found = interior.follow(worth, np.repeat(gangs[:, None, :], len(KINDS), axis=1), ROOMS, able)
        assert found is not None
        worst = max(worst, float(np.abs(found - expected).max()))
    # Measured: 8e-6.
    assert len(answers) > 50
    assert worst <= 5e-5


@st.composite
def programs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Worth, loads, rooms and where jobs can run; a resource may be missing on a type, and jobs may be picky."""
    jobs, types, resources = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    numbers = st.floats(0.01, 100.0)
    worth = np.array([[draw(numbers) for _ in range(types)] for _ in range(jobs)])
    loads = np.array(
        [[draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 16.0])) for _ in range(resources)] for _ in range(jobs)]
    )
    rooms = np.array([[draw(st.sampled_from([0.0, 1.0, 4.0, 64.0])) for _ in range(resources)] for _ in range(types)])
    fits = (loads[:, None, :] <= rooms[None]).all(axis=2)
    picky = np.array([[draw(st.integers(0, 4)) > 0 for _ in range(types)] for _ in range(jobs)])
    able = fits & picky
    rows = able.any(axis=1)
    return worth[rows], loads[rows], rooms, able[rows]


@settings(max_examples=150)
@given(program=programs())
def test_nothing_better_can_be_had_and_what_is_promised_can(
    program: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Against HiGHS: the least objective is as great, and no type, job or ruled-out pair is promised too much."""
    worth, loads, rooms, able = program
    if not len(worth):
        return
    shares = greatest_least(worth, loads, rooms, able)
    used = (loads[:, None, :] * shares[:, :, None]).sum(axis=0)
    assert shares.min() >= 0
    assert not shares[~able].any()
    assert shares.sum(axis=1).max() <= 1 + 1e-9
    assert (used <= rooms * (1 + 1e-9) + 1e-12).all()
    taken = np.where(able[:, :, None] & (rooms > 0), loads[:, None, :], 0.0)
    fractions = np.divide(taken, rooms, out=np.zeros(taken.shape), where=rooms > 0)
    best = float((np.where(able, worth, 0.0) * _corner(np.where(able, worth, 0.0), fractions, able)).sum(axis=1).min())
    reached = float((worth * shares).sum(axis=1).min())
    assert reached >= best * (1 - 1e-5)


def test_where_no_path_leads_a_corner_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that the path cannot cope with must not cost a slot its decision."""
    monkeypatch.setattr(interior, "STEPS_MAX", 2)
    worth, loads, rooms = np.array([[4.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), np.ones((3, 1)), np.ones((2, 1))
    able = np.ones((3, 2), dtype=np.bool_)
    assert interior.follow(worth, np.ones((3, 2, 1)), rooms, able) is None
    shares = greatest_least(worth, loads, rooms, able)
    # The first takes x of the fast one, and the others 1 - x of it and the slow one: 4 x = (2 - x) / 2.
    assert float((worth * shares).sum(axis=1).min()) == pytest.approx(4 * 2 / 9)


def test_numbers_of_very_different_size_give_shares_that_can_be_had() -> None:
    """A speed of next to nothing beside usual ones, as a job has that has just begun."""
    worth = np.array([[1.0, 1e-300], [1e-300, 1e300]])
    shares = greatest_least(worth, np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 2), dtype=np.bool_))
    assert np.isfinite(shares).all()
    assert shares.sum(axis=1).max() <= 1 + 1e-9
