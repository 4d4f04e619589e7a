"""Persist, then act; act in order; and a journal that gives the same commands again."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fedsched.core.commands import AdoptJobs, AskPolicy, ExecutorCommand, Order, RewardSlot, SaveJob, StartJob
from fedsched.core.decision import Decision
from fedsched.core.events import JobAssigned, JobStarted, PolicyDecided, SlotStarted, TermTaken
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import Allocation
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig
from fedsched.runtime import journal
from fedsched.runtime.journal import Journal
from fedsched.runtime.loop import Loop
from tests.core.world import dispatched, node, spec

NODES = (node("n1", 4),)


class Edges:
    """A ledger, an executor and a policy port that only remember."""

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.saved: list[SaveJob] = []
        self.orders: list[ExecutorCommand] = []
        self.asked: list[AskPolicy] = []

    def save(self, ticket: int, records: Sequence[SaveJob]) -> None:
        self.tickets.append(ticket)
        self.saved += records

    def submit(self, command: ExecutorCommand) -> None:
        self.orders.append(command)

    def ask(self, question: AskPolicy) -> None:
        self.asked.append(question)

    def reward(self, reward: RewardSlot) -> None:
        assert reward.slot >= 0

    def close(self) -> None:
        pass


def scheduler() -> Scheduler:
    return Scheduler(SchedulerConfig(ClusterName("east"), slot_length_s=10.0), NODES, check=True)


def build(path: Path) -> tuple[Loop, Edges, Journal]:
    edges, record = Edges(), Journal(path)
    return Loop(scheduler(), edges, edges, edges, record), edges, record


def drive(loop: Loop) -> None:
    job = spec("a")
    loop.step(TermTaken(0.0, 1))
    loop.step(JobAssigned(1.0, job, dispatched(job)))
    loop.step(SlotStarted(10.0, 1))
    loop.step(PolicyDecided(10.1, Decision(1, ((job.job_id, Allocation(1, 1)),), "test")))


def test_an_order_goes_out_only_when_its_record_is_written(tmp_path: Path) -> None:
    """Tasks that the store knows nothing of are lost when the agent dies."""
    loop, edges, record = build(tmp_path / "j")
    drive(loop)
    assert [type(order) for order in edges.orders] == [AdoptJobs]
    assert [type(save) for save in edges.saved] == [SaveJob]
    loop.confirm(edges.tickets[0])
    assert [type(order) for order in edges.orders] == [AdoptJobs, StartJob]
    record.close()


def test_orders_leave_in_the_order_in_which_they_were_given(tmp_path: Path) -> None:
    """A later order that overtakes an earlier one would be refused or, worse, obeyed."""
    loop, edges, record = build(tmp_path / "j")
    drive(loop)
    loop.step(SlotStarted(20.0, 2))
    assert len(edges.asked) == 1
    assert loop.unconfirmed == 2
    loop.confirm(edges.tickets[0])
    assert loop.unconfirmed == 0
    assert len(edges.asked) == 2
    record.close()


def test_a_journal_gives_a_fresh_scheduler_the_same_commands(tmp_path: Path) -> None:
    """What a replay cannot repeat, nobody can explain."""
    path = tmp_path / "j"
    loop, edges, record = build(path)
    drive(loop)
    loop.confirm(edges.tickets[0])
    loop.step(JobStarted(11.0, JobId("a"), 1))
    record.close()
    fresh = scheduler()
    steps = journal.steps(path)
    assert len(steps) == 5
    for step in steps:
        assert fresh.handle(step.event) == step.commands


def test_a_line_torn_by_a_crash_ends_the_journal_quietly(tmp_path: Path) -> None:
    path = tmp_path / "j"
    loop, _, record = build(path)
    drive(loop)
    record.close()
    whole = list(journal.read(path))
    path.write_text(path.read_text()[:-40])
    assert list(journal.read(path)) == whole[:-1]


def test_a_journal_that_grows_too_large_keeps_its_newest_part(tmp_path: Path) -> None:
    """An agent that runs for months must not fill its disk."""
    path = tmp_path / "j"
    record = Journal(path, size_max_bytes=400)
    for slot in range(20):
        record.append(SlotStarted(float(slot), slot), [])
    record.close()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["j", "j.old"]
    assert sum(found.stat().st_size for found in tmp_path.iterdir()) < 1000
    slots = [
        step.event.slot
        for name in ("j.old", "j")
        for step in journal.steps(tmp_path / name)
        if isinstance(step.event, SlotStarted)
    ]
    assert slots == list(range(slots[0], 20))


def test_a_full_disk_costs_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """The cluster goes on, and the operator reads of it once, not once a step."""
    record = Journal(Path("/dev/full"))
    record.append(SlotStarted(1.0, 1), [])
    record.append(SlotStarted(2.0, 2), [])
    record.close()
    assert [line.message for line in caplog.records] == [
        "the journal /dev/full cannot be written any more: No space left on device"
    ]


@given(kept=st.integers(min_value=0))
def test_an_agent_that_comes_after_a_killed_one_writes_lines_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, kept: int
) -> None:
    """Behind a torn line the first of the next agent was lost, and with it all that the next agent did."""
    path = tmp_path_factory.mktemp("torn") / "j"
    loop, _, record = build(path)
    drive(loop)
    record.close()
    before = list(journal.read(path))
    whole = path.read_bytes()
    kept %= len(whole) + 1
    path.write_bytes(whole[:kept])

    after = Journal(path)
    after.append(SlotStarted(9.0, 9), [])
    after.close()

    assert list(journal.read(path))[:-1] == before[: whole[:kept].count(b"\n")]
    assert [step.event for step in journal.steps(path)][-1] == SlotStarted(9.0, 9)


@pytest.mark.parametrize("room", range(300, 420, 7))
def test_a_journal_on_a_disk_that_fills_up_ends_with_a_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """What was recorded before must be of use, also where there is room again later: a gap cannot be repeated."""
    record = Journal(tmp_path / "j")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        for slot in range(20):
            record.append(SlotStarted(float(slot), slot), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record.append(SlotStarted(99.0, 99), [])
    record.close()

    text = (tmp_path / "j").read_text()
    slots = [step.event.slot for step in journal.steps(tmp_path / "j") if isinstance(step.event, SlotStarted)]
    assert text.endswith("\n")
    assert slots == list(range(text.count("\n")))
    assert 0 < len(slots) < 20
    assert len(caplog.records) == 1


def test_every_order_has_somebody_to_carry_it_out() -> None:
    """The type checker does not look into the table: an order that is forgotten there would end the agent."""
    edges = Edges()
    loop = Loop(scheduler(), edges, edges, edges, None)
    assert set(loop._act) == set(get_args(Order))
