"""The scaling protocol in a small simulated world: drawn delays, losses, repeats, resizes, stops and deaths."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsched.core import membership
from fedsched.core.blocks import Block, assign, index_of, travelling
from fedsched.core.ids import TaskName
from fedsched.core.job import Role, role_of
from fedsched.core.membership import Phase, Plan, View
from fedsched.core.scaling import Scaling, ScalingConfig

BLOCKS = (Block("a", 400), Block("b", 100), Block("c", 90), Block("d", 10), Block("e", 10))
CONFIG = ScalingConfig(join_s=20.0, stall_s=60.0, checkpoint_every_s=1.0, resend_s=0.5, switch_bytes_min=0.0)


def names(*tasks: str) -> tuple[TaskName, ...]:
    return tuple(TaskName(task) for task in tasks)


@dataclass
class Twin:
    """One simulated member: does what real ones do with its views, and checks what it is asked to do."""

    task: TaskName
    born_s: float
    view: View | None = None
    step: int = -1
    """Worker: the version it has parameters of."""
    holds: int = 0
    saved: int = -1
    alive: bool = True
    left: bool = False
    pushing: bool = False
    ending: bool = False
    shares: bool = False
    """Server: on the coordinator's machine."""
    disk_s: float = 0.0
    """Server: when its disk will have written what it was given so far."""


@dataclass
class World:
    """Members, the parameters' history and the network between them, in virtual time."""

    chance: random.Random
    steps: int
    loss: float
    """Probability that a message is lost; reports are levels and are repeated, as views are."""
    core: Scaling
    far: bool = False
    """No two tasks share memory."""
    linger_s: float = 1.0
    """A script goes on for up to so long after its last step."""
    now_s: float = 0.0
    twins: dict[TaskName, Twin] = field(default_factory=dict)
    answers: dict[int, membership.AnswerScale] = field(default_factory=dict)
    end: membership.End | None = None
    version: list[int] = field(default_factory=lambda: [0] * len(BLOCKS))
    """Steps that each block has been through."""
    place: list[TaskName | None] = field(default_factory=lambda: [None] * len(BLOCKS))
    pushes: dict[int, dict[TaskName, int]] = field(default_factory=dict)
    """Of each step: who contributed, under which plan."""
    plans: dict[int, Plan] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    saves: set[int] = field(default_factory=set)
    """Checkpoints that the pushes of asynchronous workers have told the servers of."""
    shards: dict[tuple[int, TaskName], dict[int, int]] = field(default_factory=dict)
    """What servers wrote for each checkpoint: blocks and the versions that these had."""
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    # Time and messages.

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, action))

    def deliver(self, action: Callable[[], None]) -> None:
        """A message: any delay, so any order; sometimes twice, sometimes not at all."""
        if self.chance.random() >= self.loss:
            self.after(self.chance.expovariate(20.0), action)
        if self.chance.random() < 0.1:
            self.after(self.chance.expovariate(5.0), action)

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self.now_s = until_s

    def run_out(self, limit_s: float = 300.0) -> None:
        """Until the job is over and everybody gone."""
        until_s = self.now_s + limit_s
        while self.now_s < until_s and (self.end is None or any(twin.alive for twin in self.twins.values())):
            self.run(self.now_s + 0.5)

    def tell(self, event: membership.Event) -> None:
        for command in self.core.handle(event):
            match command:
                case membership.Send(task, view):
                    self.plans.update({plan.number: plan for plan in view.plans})
                    # Over the connection of the process that is there now: a later one of its name has another.
                    self.deliver(partial(self.see, self.twins.get(task), view))
                case membership.AnswerScale():
                    assert command.seq not in self.answers, "an order is answered once"
                    self.answers[command.seq] = command
                case membership.CompleteCheckpoint(step, servers):
                    self.check_manifest(step, servers)
                    self.after(0.05, lambda step=step: self.written(step))  # type: ignore[misc]
                case membership.End():
                    assert self.end is None
                    self.end = command

    def check_manifest(self, step: int, servers: tuple[TaskName, ...]) -> None:
        """Every block is in exactly one shard, at exactly the checkpoint's step."""
        held = [item for server in servers for item in self.shards[step, server].items()]
        assert sorted(held) == [(index, step) for index in range(len(BLOCKS))]

    def snapshot(self, server: TaskName) -> None:
        """A server copies its blocks at once and writes them in its own time, one checkpoint after the other."""
        twin = self.twins[server]
        held = {index: self.version[index] for index, place in enumerate(self.place) if place == server}
        (version,) = set(held.values())

        def on_disk() -> None:
            if twin.alive:
                self.shards[version, server] = held
                twin.saved = max(twin.saved, version)

        twin.disk_s = max(twin.disk_s, self.now_s) + self.chance.expovariate(4.0)
        self.after(twin.disk_s - self.now_s, on_disk)

    def written(self, step: int) -> None:
        self.checkpoints.append(step)
        self.tell(membership.CheckpointWritten(self.now_s, step))

    # Members.

    def start(self, task: TaskName, delay_s: float) -> None:
        def born() -> None:
            self.twins[task] = Twin(task, self.now_s, shares=self.chance.random() < 0.3 and not self.far)
            self.work(self.twins[task])

        self.after(delay_s, born)

    def work(self, twin: Twin) -> None:
        """A member's turn: act on the newest view, then report, then come again."""
        if not twin.alive:
            return
        if twin.view is not None:
            if twin.view.leave:
                self.leave(twin)
                return
            if role_of(twin.task) is Role.WORKER and self.core.asynchronous:
                self.work_alone(twin, twin.view)
            elif role_of(twin.task) is Role.WORKER:
                self.work_worker(twin, twin.view)
            else:
                self.work_server(twin, twin.view)
        if not twin.alive:
            return
        report = membership.TaskReported(
            self.now_s,
            twin.task,
            seen=twin.view.number if twin.view else 0,
            done=max(twin.step, 0),
            holds=twin.holds,
            saved=twin.saved,
            pause_s=self.chance.choice((0.0, 0.05)),
            shares=twin.shares,
        )
        self.deliver(lambda: self.report(twin, report))
        self.after(self.chance.uniform(0.02, 0.1), lambda: self.work(twin))

    def report(self, twin: Twin, report: membership.TaskReported) -> None:
        if twin.alive and self.twins[twin.task] is twin:
            self.tell(report)

    def see(self, twin: Twin | None, view: View) -> None:
        if twin is not None and twin.alive and (twin.view is None or view.number > twin.view.number):
            twin.view = view

    def leave(self, twin: Twin) -> None:
        twin.alive, twin.left = False, True
        # The connection of a process that ends is closed, and that is never lost.
        self.after(self.chance.uniform(0.0, 0.2), lambda: self.tell(membership.TaskGone(self.now_s, twin.task)))

    def vanish(self, twin: Twin) -> None:
        if twin.alive:
            self.leave(twin)

    def kill(self, task: TaskName) -> None:
        self.twins[task].alive = False
        self.after(0.05, lambda: self.tell(membership.TaskGone(self.now_s, task)))

    def work_worker(self, twin: Twin, view: View) -> None:
        if twin.step < 0:
            mine = [plan for plan in view.plans if twin.task in plan.workers]
            if mine and all(self.served(index, mine[0], mine[0].from_step) for index in range(len(BLOCKS))):
                twin.step = mine[0].from_step
            return
        if twin.step >= self.steps:
            if view.finished and not twin.ending:
                # The script ends, after whatever it does with the trained model, and without another word.
                twin.ending = True
                self.after(self.chance.uniform(0.0, self.linger_s), lambda: self.vanish(twin))
            return
        covering = [plan for plan in view.plans if plan.from_step <= twin.step]
        if not covering or twin.step >= view.granted or twin.task not in covering[-1].workers:
            return
        plan = covering[-1]
        if not twin.pushing and not all(self.served(index, plan, twin.step) for index in range(len(BLOCKS))):
            return
        pushes = self.pushes.setdefault(twin.step, {})
        pushes[twin.task] = plan.number
        twin.pushing = True
        assert set(pushes.values()) == {plan.number}, "a step runs under one plan"
        save = twin.step + 1 in view.saves or twin.step + 1 == self.steps
        if set(pushes) == set(plan.workers) and self.version[0] == twin.step:
            self.version = [twin.step + 1] * len(BLOCKS)
            for server in sorted(set(plan.owners)) if save else []:
                self.snapshot(server)
        if self.version[0] > twin.step:
            twin.step, twin.pushing = twin.step + 1, False

    def work_alone(self, twin: Twin, view: View) -> None:
        """An asynchronous worker's turn."""
        if twin.step < 0:
            mine = [plan for plan in view.plans if twin.task in plan.workers]
            if mine and all(self.held(index, mine[0]) for index in range(len(BLOCKS))):
                twin.step = mine[0].from_step
            return
        if twin.step >= self.steps:
            if view.finished and not twin.ending:
                twin.ending = True
                self.after(self.chance.uniform(0.0, self.linger_s), lambda: self.vanish(twin))
            return
        for plan, following in zip(view.plans, (*view.plans[1:], None), strict=True):
            over = following is not None and twin.step >= following.from_step
            if over or plan.from_step > twin.step or twin.task not in plan.workers:
                continue
            end = following.from_step if following else self.steps
            rank, workers = plan.workers.index(twin.task), len(plan.workers)
            step = next(n for n in range(plan.from_step + rank, self.steps + workers, workers) if n >= twin.step)
            if step >= end:
                twin.step = end
                continue
            self.saves.update((*view.saves, self.steps))
            below = max((save for save in self.saves if save <= step), default=0)
            held = all(self.held(index, plan) for index in range(len(BLOCKS)))
            if step >= view.granted or not held or self.version[0] < below:
                return
            assert step not in self.pushes, "a step is taken once"
            self.pushes[step] = {twin.task: plan.number}
            self.version = [self.version[0] + 1] * len(BLOCKS)
            if self.version[0] in self.saves:
                for server in sorted(set(plan.owners)):
                    self.snapshot(server)
            twin.step = step + 1
            return

    def held(self, index: int, plan: Plan) -> bool:
        """Whether the block is where the plan wants it, at any version."""
        return self.served(index, plan, self.version[index])

    def served(self, index: int, plan: Plan, version: int) -> bool:
        """Whether the block is where the plan wants it, at the version."""
        owner = self.twins.get(plan.owners[index])
        return (
            self.place[index] == plan.owners[index]
            and self.version[index] == version
            and owner is not None
            and owner.alive
            and owner.holds >= plan.number
        )

    def work_server(self, twin: Twin, view: View) -> None:
        for plan in view.plans:
            for index, owner in enumerate(plan.owners):
                receiver = self.twins.get(owner)
                at_clock = self.version[index] == plan.from_step and plan.number > twin.holds
                first = plan.number == 1 and self.place[index] is None and owner == twin.task
                if at_clock and (first or self.place[index] == twin.task) and receiver and receiver.alive:
                    self.place[index] = owner
        here = {index for index, place in enumerate(self.place) if place == twin.task}
        for plan in view.plans:
            owned = {index for index, owner in enumerate(plan.owners) if owner == twin.task}
            if here == owned and all(self.version[index] >= plan.from_step for index in owned):
                twin.holds = max(twin.holds, plan.number)


def world_of(
    seed: int,
    first: tuple[TaskName, ...],
    steps: int = 60,
    loss: float = 0.0,
    start_step: int = 0,
    asynchronous: bool = False,
) -> World:
    world = World(random.Random(seed), steps, loss, Scaling(first, 0.0, start_step, CONFIG))
    world.version = [start_step] * len(BLOCKS)
    world.tell(membership.ModelDescribed(0.0, BLOCKS, steps, asynchronous))
    for task in first:
        world.start(task, world.chance.uniform(0.0, 2.0))

    def tick() -> None:
        world.tell(membership.Tick(world.now_s))
        world.after(0.1, tick)

    tick()
    return world


def check_history(world: World, start_step: int = 0) -> None:
    """Every step below the common version was taken once, by exactly the workers of the plan that covers it."""
    assert len(set(world.version)) == 1, "blocks never drift apart once all is quiet"
    for step in range(start_step, world.version[0]):
        pushes = world.pushes[step]
        covering = [plan for plan in world.plans.values() if plan.from_step <= step]
        plan = max(covering, key=lambda plan: plan.number)
        workers = set(plan.workers)
        if world.core.asynchronous:
            workers = {plan.workers[(step - plan.from_step) % len(plan.workers)]}
        assert set(pushes) == workers
        assert set(pushes.values()) == {plan.number}


tasks_drawn = st.tuples(st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 2), min_size=1)).map(
    lambda drawn: names(*(f"worker-{i}" for i in sorted(drawn[0])), *(f"ps-{i}" for i in sorted(drawn[1])))
)


@settings(max_examples=40)
@example(  # a name that is taken again while the view that told its first owner to leave is still under way
    seed=608520,
    first=names("worker-3", "ps-1"),
    orders=[
        (0.0, names("worker-0", "ps-1")),
        (0.0, names("worker-0", "worker-1", "worker-2", "worker-3", "ps-0")),
    ],
    loss=0.0,
    start_step=0,
    asynchronous=False,
)
@given(
    seed=st.integers(0, 2**32),
    first=tasks_drawn,
    orders=st.lists(st.tuples(st.floats(0.0, 2.0), tasks_drawn), max_size=5),
    loss=st.sampled_from([0.0, 0.2, 0.5]),
    start_step=st.sampled_from([0, 7, 60]),
    asynchronous=st.booleans(),
)
def test_a_job_finishes_with_every_step_taken_once_whatever_is_resized_lost_or_late(
    seed: int,
    first: tuple[TaskName, ...],
    orders: list[tuple[float, tuple[TaskName, ...]]],
    loss: float,
    start_step: int,
    asynchronous: bool,
) -> None:
    """A gradient that is lost or added twice ruins a training without anybody seeing why."""
    world = world_of(seed, first, loss=loss, start_step=start_step, asynchronous=asynchronous)
    world.run(3.0)
    for seq, (pause_s, wanted) in enumerate(orders, 1):
        if world.core.ended:
            break
        for task in wanted:
            if task not in world.twins or world.twins[task].left:
                world.start(task, world.chance.uniform(0.0, 0.5))
        world.tell(membership.ScaleRequested(world.now_s, seq, wanted, 10.0))
        until_s = world.now_s + 30.0
        while seq not in world.answers and world.now_s < until_s:
            world.run(world.now_s + 0.1)
        answer = world.answers[seq]
        if answer.ok:
            assert answer.tasks == tuple(sorted(wanted, key=index_of))
        # As an executor does: tasks that are not members any more are gone before the next order.
        until_s = world.now_s + 60.0
        while not world.core.ended and any(
            twin.alive and task not in world.core.members for task, twin in world.twins.items()
        ):
            world.run(world.now_s + 0.1)
            assert world.now_s < until_s, "who is no member leaves"
        world.run(world.now_s + pause_s)
    world.run_out()

    assert world.end is not None, "the job comes to its end"
    assert world.end.phase is Phase.FINISHED, world.end.message
    check_history(world, start_step)
    assert world.version[0] == world.steps
    assert world.core.checkpoint_step == world.steps
    assert not any(twin.alive for twin in world.twins.values()), "nobody stays behind"


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    first=tasks_drawn,
    wanted=tasks_drawn,
    steps=st.integers(1, 12),
    order_at_s=st.floats(2.0, 4.0),
    linger_s=st.sampled_from([0.0, 0.5, 8.0]),
    loss=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_no_order_of_good_byes_at_the_end_is_taken_for_a_crash(
    seed: int,
    first: tuple[TaskName, ...],
    wanted: tuple[TaskName, ...],
    steps: int,
    order_at_s: float,
    linger_s: float,
    loss: float,
) -> None:
    """Hours of training would be called failed because one script evaluates longer than another."""
    world = world_of(seed, first, steps=steps, loss=loss)
    world.linger_s = linger_s
    world.run(order_at_s)
    for task in wanted:
        if task not in first:
            world.start(task, world.chance.uniform(0.0, 0.5))
    world.tell(membership.ScaleRequested(world.now_s, 1, wanted, 5.0))
    world.run_out()

    assert world.end == membership.End(Phase.FINISHED, "")
    assert 1 in world.answers
    assert world.core.checkpoint_step == steps
    check_history(world)
    assert not any(twin.alive for twin in world.twins.values())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    wanted=tasks_drawn,
    victim=st.integers(0, 6),
    at_s=st.floats(2.5, 6.0),
    loss=st.sampled_from([0.0, 0.3]),
    asynchronous=st.booleans(),
)
def test_a_death_at_any_moment_of_a_resize_ends_the_attempt_or_the_resize_but_never_hangs(
    seed: int, wanted: tuple[TaskName, ...], victim: int, at_s: float, loss: float, asynchronous: bool
) -> None:
    """Who waits for a dead member for ever holds a cluster's machines for ever."""
    first = names("ps-0", "worker-0", "worker-1")
    world = world_of(seed, first, steps=200, loss=loss, asynchronous=asynchronous)
    world.run(2.5)
    for task in wanted:
        if task not in first:
            world.start(task, world.chance.uniform(0.0, 1.0))
    world.tell(membership.ScaleRequested(world.now_s, 1, wanted, 5.0))
    world.run(at_s)
    living = sorted(task for task, twin in world.twins.items() if twin.alive)
    if living:
        world.kill(living[victim % len(living)])
    world.run_out()

    assert 1 in world.answers
    assert world.end is not None
    assert world.end.phase in (Phase.FINISHED, Phase.FAILED)
    if world.end.phase is Phase.FINISHED:
        check_history(world)
    assert not any(twin.alive for twin in world.twins.values())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    wanted=tasks_drawn,
    at_s=st.floats(0.0, 4.0),
    checkpoint=st.booleans(),
    loss=st.sampled_from([0.0, 0.3]),
    asynchronous=st.booleans(),
)
def test_a_stop_at_any_moment_ends_the_job_with_the_checkpoint_it_was_asked_for(
    seed: int, wanted: tuple[TaskName, ...], at_s: float, checkpoint: bool, loss: float, asynchronous: bool
) -> None:
    """A preempted job resumes from there; without it the work since the last one is lost."""
    first = names("ps-0", "worker-0")
    world = world_of(seed, first, steps=500, loss=loss, asynchronous=asynchronous)
    world.run(2.5)
    for task in wanted:
        if task not in first:
            world.start(task, world.chance.uniform(0.0, 1.0))
    world.tell(membership.ScaleRequested(world.now_s, 1, wanted, 5.0))
    world.run(world.now_s + at_s)
    done = world.core.done
    world.tell(membership.StopRequested(world.now_s, checkpoint, 60.0))
    world.run_out()

    assert world.end == membership.End(Phase.STOPPED, "")
    assert 1 in world.answers
    if checkpoint:
        assert world.core.checkpoint_step >= done
        assert world.core.checkpoint_step == world.version[0], "nothing ran beyond the checkpoint"
    assert not any(twin.alive for twin in world.twins.values())


def test_a_resize_whose_new_task_does_not_join_is_rolled_back_and_the_others_train_on() -> None:
    """A node that cannot start a task must cost the job nothing but the resize."""
    world = world_of(1, names("ps-0", "worker-0"), steps=300)
    world.run(3.0)
    world.tell(membership.ScaleRequested(world.now_s, 1, names("ps-0", "worker-0", "worker-1", "worker-2"), 2.0))
    world.start(TaskName("worker-1"), 0.1)
    world.run(world.now_s + 5.0)

    answer = world.answers[1]
    assert (answer.ok, answer.tasks) == (False, names("ps-0", "worker-0"))
    assert answer.message == "worker-2 did not join in time"
    assert world.twins[TaskName("worker-1")].left, "who came for it is sent away"
    world.run_out()
    assert world.end == membership.End(Phase.FINISHED, "")


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    wanted=st.sampled_from([names("ps-1", "worker-1"), names("ps-1", "ps-2", "worker-0", "worker-1")]),
    loss=st.sampled_from([0.0, 0.3]),
    asynchronous=st.booleans(),
)
def test_blocks_that_travel_move_in_switches_of_few_bytes_and_come_to_where_one_switch_would_bring_them(
    seed: int, wanted: tuple[TaskName, ...], loss: float, asynchronous: bool
) -> None:
    """Workers wait for the blocks of a switch: for half a large model, as long as a network needs to carry it."""
    first = names("ps-0", "worker-0")
    world = world_of(seed, first, steps=2000, loss=loss, asynchronous=asynchronous)
    world.far = True
    world.run(4.0)
    for task in wanted:
        if task not in first:
            world.start(task, world.chance.uniform(0.0, 0.5))
    world.tell(membership.ScaleRequested(world.now_s, 1, wanted, 10.0))
    until_s = world.now_s + 120.0
    while 1 not in world.answers and world.now_s < until_s:
        world.run(world.now_s + 0.1)

    assert world.answers[1] == membership.AnswerScale(1, True, wanted, world.answers[1].pause_s)
    plans = [world.plans[number] for number in sorted(world.plans)]
    moves = [travelling(a.owners, b.owners, ()) for a, b in itertools.pairwise(plans)]
    assert len(moves) > 1
    assert sorted(itertools.chain(*moves)) == [0, 1, 2, 3, 4], "each once"
    assert plans[-1].owners == assign(BLOCKS, plans[-1].servers, plans[0].owners)
    assert all(set(plan.workers) == {task for task in wanted if "worker" in task} for plan in plans[1:]), "at once"
    world.tell(membership.StopRequested(world.now_s, True, 60.0))
    world.run_out()
    check_history(world)


def travelling_core(*first: str, steps: int = 10_000) -> Scaling:
    """A job of which each block travels by itself, ready to be resized."""
    config = ScalingConfig(growth=1.0, switches_max=1000, switch_bytes_min=0.0, checkpoint_every_s=5.0)
    core = Scaling(names(*first), 0.0, 0, config)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, steps))
    for task in names(*first):
        core.handle(membership.TaskReported(1.0, task))
    return core


def take_steps(core: Scaling, time_s: float, *servers: str) -> list[membership.Command]:
    """The worker takes all that it may, and servers have what they shall have."""
    number = (core.next_plan or core.plan or Plan(1, 0, (), (), ())).number
    commands = core.handle(membership.TaskReported(time_s, TaskName("worker-0"), done=core.granted))
    for server in servers:
        commands += core.handle(membership.TaskReported(time_s, TaskName(server), holds=number, saved=core.granted))
    return commands


def test_an_order_that_comes_while_blocks_travel_takes_over_from_where_they_are() -> None:
    """An agent that restarts asks who takes part, and must not wait for the end of what its predecessor ordered."""
    core = travelling_core("ps-0", "worker-0")
    core.handle(membership.TaskReported(1.0, TaskName("ps-1")))
    core.handle(membership.ScaleRequested(2.0, 1, names("ps-1", "worker-0"), 5.0))
    for time_s in (2.1, 2.2):
        take_steps(core, time_s, "ps-0", "ps-1")
    assert set(core.members) == set(names("ps-0", "ps-1", "worker-0")), "who holds blocks is a member"

    core.handle(membership.ScaleRequested(2.3, 2, names("ps-0", "worker-0"), 5.0))
    answers: list[membership.AnswerScale] = []
    time_s = 2.3
    while len(answers) < 2 and time_s < 10.0:
        time_s += 0.1
        commands = take_steps(core, time_s, "ps-0", "ps-1")
        answers += [command for command in commands if isinstance(command, membership.AnswerScale)]

    assert [(answer.seq, answer.ok) for answer in answers] == [(1, False), (2, True)]
    assert core.plan is not None
    assert set(core.plan.owners) == set(names("ps-0"))


def test_a_checkpoint_that_is_due_while_blocks_travel_is_written_between_two_switches() -> None:
    """A large model on a slow network may travel for long, and the machine may die meanwhile."""
    core = travelling_core("ps-0", "worker-0")
    core.handle(membership.TaskReported(1.0, TaskName("ps-1")))
    core.handle(membership.ScaleRequested(2.0, 1, names("ps-1", "worker-0"), 5.0))
    time_s, story = 2.0, list[str]()
    while not any(line == "answer" for line in story) and time_s < 100.0:
        time_s += 1.0
        for command in take_steps(core, time_s, "ps-0", "ps-1"):
            match command:
                case membership.CompleteCheckpoint(step):
                    story.append("checkpoint")
                    core.handle(membership.CheckpointWritten(time_s, step))
                case membership.AnswerScale():
                    story.append("answer")

    assert story[-1] == "answer"
    assert "checkpoint" in story


@pytest.mark.parametrize("steps", range(6, 40))
def test_a_training_that_ends_while_blocks_travel_keeps_every_server_that_has_some(steps: int) -> None:
    """A resize that is given up there would have its newcomers ended, and what they hold is lost with them."""
    core = travelling_core("ps-0", "worker-0", steps=steps)
    core.handle(membership.TaskReported(1.0, TaskName("ps-1")))
    commands = core.handle(membership.ScaleRequested(2.0, 1, names("ps-1", "worker-0"), 5.0))
    for index in range(60):
        news = take_steps(core, 2.1 + index / 10, "ps-0", "ps-1")
        for command in news:
            if isinstance(command, membership.CompleteCheckpoint):
                news = news + core.handle(membership.CheckpointWritten(2.1 + index / 10, command.step))
        assert core.plan is not None
        told = {c.task for c in news if isinstance(c, membership.Send) and c.view.leave}
        assert core.ended or not told & set(core.plan.owners)
        commands += news
    commands += core.handle(membership.TaskGone(9.0, TaskName("worker-0")))

    assert core.phase is Phase.FINISHED
    assert sum(isinstance(command, membership.AnswerScale) for command in commands) == 1


def test_a_newcomer_that_is_known_to_have_ended_is_not_waited_for() -> None:
    """The job would keep others' places for it until the deadline, and whoever ordered the resize waits as long."""
    core = Scaling(names("ps-0", "worker-0"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10_000))
    for task in names("ps-0", "worker-0"):
        core.handle(membership.TaskReported(1.0, task))
    core.handle(membership.ScaleRequested(2.0, 7, names("ps-0", "worker-0", "worker-1", "worker-2"), 500.0))
    core.handle(membership.TaskReported(2.1, TaskName("worker-2")))
    ignored = core.handle(membership.NewcomerLost(2.2, 6, TaskName("worker-1"), "an order before"))
    commands = core.handle(membership.NewcomerLost(2.3, 7, TaskName("worker-1"), "out of memory"))

    assert not ignored
    message = "worker-1 ended before it joined: out of memory"
    assert membership.AnswerScale(7, False, names("ps-0", "worker-0"), 0.0, message) in commands
    assert [c.task for c in commands if isinstance(c, membership.Send) and c.view.leave] == ["worker-2"]


def test_a_job_whose_first_members_do_not_come_fails_and_names_them() -> None:
    """An executor that lost a task needs its name, not a job that starts for ever."""
    core = Scaling(names("ps-0", "worker-0", "worker-1"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10))
    core.handle(membership.TaskReported(1.0, TaskName("ps-0")))
    commands = core.handle(membership.Tick(20.5))

    assert membership.End(Phase.FAILED, "worker-0, worker-1 did not join within 20 s") in commands


def test_a_job_that_stands_still_fails_and_names_the_slowest() -> None:
    """A worker that hangs in the user's code must not hold the others' machines."""
    core = Scaling(names("ps-0", "worker-0", "worker-1"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10))
    for task in names("ps-0", "worker-0", "worker-1"):
        core.handle(membership.TaskReported(1.0, task))
    core.handle(membership.TaskReported(2.0, TaskName("worker-0"), done=1))
    commands = core.handle(membership.Tick(63.0))

    assert membership.End(Phase.FAILED, "no step ended within 60 s; worker-1 is furthest behind") in commands


def test_a_switch_that_does_not_come_to_its_end_fails_the_job_and_names_whom_it_waits_for() -> None:
    """Whoever ordered the resize waits for its answer, and the next order for the end of this one."""
    core = Scaling(names("ps-0", "worker-0"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10_000))
    for task in names("ps-0", "worker-0", "ps-1"):
        core.handle(membership.TaskReported(1.0, task))
    core.handle(membership.ScaleRequested(2.0, 7, names("ps-0", "ps-1", "worker-0"), 5.0))
    assert core.next_plan is not None
    clock, commands, at_s = core.next_plan.from_step, list[membership.Command](), 2.0
    while core.phase is Phase.TRAINING and at_s < 200.0:  # steps go on, and nothing is heard of ps-1
        at_s += 1.0
        commands = core.handle(membership.TaskReported(at_s, TaskName("ps-0"), holds=2))
        commands += core.handle(membership.TaskReported(at_s, TaskName("worker-0"), done=int(at_s)))

    message = f"the switch at step {clock} was not complete within 60 s: ps-1"
    assert membership.End(Phase.FAILED, message) in commands
    answer = next(command for command in commands if isinstance(command, membership.AnswerScale))
    assert (answer.seq, answer.ok) == (7, False)


def test_a_process_that_comes_under_the_name_of_a_finished_worker_is_sent_away() -> None:
    """The job waited for ever for it to take steps that were taken long ago."""
    core = Scaling(names("ps-0", "worker-0", "worker-1"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10))
    for task in names("ps-0", "worker-0", "worker-1"):
        core.handle(membership.TaskReported(1.0, task))
    core.handle(membership.TaskReported(2.0, TaskName("worker-0"), done=10))
    core.handle(membership.TaskGone(3.0, TaskName("worker-0")))
    commands = core.handle(membership.TaskReported(4.0, TaskName("worker-0")))
    assert [c.view.leave for c in commands if isinstance(c, membership.Send) and c.task == "worker-0"] == [True]
    for command in core.handle(membership.TaskReported(5.0, TaskName("ps-0"), saved=10)):
        if isinstance(command, membership.CompleteCheckpoint):
            core.handle(membership.CheckpointWritten(5.0, command.step))
    core.handle(membership.TaskReported(6.0, TaskName("worker-1"), done=10))
    core.handle(membership.TaskGone(7.0, TaskName("worker-0")))
    assert membership.End(Phase.FINISHED, "") in core.handle(membership.TaskGone(8.0, TaskName("worker-1")))


def test_a_script_may_take_its_time_after_the_last_step() -> None:
    """A long evaluation of the trained model is no standstill."""
    core = Scaling(names("ps-0", "worker-0"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10))
    for task in names("ps-0", "worker-0"):
        core.handle(membership.TaskReported(1.0, task))
    core.handle(membership.TaskReported(2.0, TaskName("worker-0"), done=10))
    saves = core.handle(membership.TaskReported(2.0, TaskName("ps-0"), saved=10))
    for command in saves:
        assert isinstance(command, membership.CompleteCheckpoint)
        core.handle(membership.CheckpointWritten(3.0, command.step))
    core.handle(membership.Tick(3000.0))
    before = core.phase
    core.handle(membership.TaskGone(3001.0, TaskName("worker-0")))
    assert (before, core.phase) == (Phase.TRAINING, Phase.FINISHED)


def test_the_last_checkpoint_not_written_fails_the_job_and_any_other_does_not() -> None:
    """A training whose result cannot be kept has not succeeded."""
    core = Scaling(names("ps-0", "worker-0"), 0.0, 0, CONFIG)
    core.handle(membership.ModelDescribed(0.0, BLOCKS, 10))
    for task in names("ps-0", "worker-0"):
        core.handle(membership.TaskReported(1.0, task))
    core.handle(membership.CheckpointFailed(2.0, 5, "disk full"))
    assert core.phase is Phase.TRAINING
    core.handle(membership.CheckpointFailed(3.0, 10, "disk full"))
    assert (core.phase, core.message) == (Phase.FAILED, "the last checkpoint could not be written: disk full")
