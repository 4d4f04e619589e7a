"""Which node a task gets, while grants come and go: whatever is remembered, it is the node that a plain look finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsched.core.choosing import Rule
from fedsched.core.cluster import Node
from fedsched.core.ids import NodeName
from fedsched.core.job import Role, TaskPlacement, task_name
from fedsched.core.resources import Resources, amount_of
from fedsched.core.vacancies import Vacancies

DEMANDS = (Resources(cpu_milli=1000), Resources(cpu_milli=2000, gpu_milli=1000), Resources(memory_mib=3))
TYPES = ("", "k80", "v100")
ALLOWED = ((), ("v100", "k80"), ("k80",))


@dataclass
class Plain:
    """The same by sums over all tasks, each time anew."""

    nodes: tuple[Node, ...]
    rule: Rule
    running: list[tuple[NodeName, Resources]]
    granted: list[tuple[NodeName, Resources]] = field(default_factory=list)

    def free(self, node: Node) -> Resources:
        return self._without(node, self.granted)

    def _without(self, node: Node, tasks: list[tuple[NodeName, Resources]]) -> Resources:
        left = node.capacity
        for name, demand in tasks:
            left = left - demand if name == node.name else left
        return left

    def choose(self, demand: Resources, accelerators: tuple[str, ...], own: set[NodeName]) -> NodeName | None:
        ranked: list[tuple[bool, int, bool, tuple[float, ...], NodeName]] = []
        for node in self.nodes:
            free, firm = self.free(node), self._without(node, self.granted + self.running)
            if not demand.fits_in(free) or not node.schedulable:
                continue
            if accelerators and node.accelerator not in accelerators:
                continue
            liking = accelerators.index(node.accelerator) if accelerators else 0
            share = (node.capacity - free + demand).dominant_share(node.capacity)
            rank = (share,) if self.rule == "spread" else (free.gpu_milli, free.cpu_milli, free.memory_mib)
            ranked.append((not demand.fits_in(firm), liking, node.name not in own, rank, node.name))
        return min(ranked)[-1] if ranked else None

    def can_stay(self, name: NodeName) -> bool:
        """Whether everything that runs on a node, and is granted there, has room together."""
        here = [node for node in self.nodes if node.name == name]
        return bool(here) and Resources().fits_in(self._without(here[0], self.granted + self.running))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[Node, ...], list[tuple[NodeName, Resources]]]:
    """A few nodes of a few kinds, and what runs on them; now and then too much, or on a lost node."""
    kinds = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 9), st.sampled_from(TYPES), st.booleans())
    nodes = tuple(
        Node(NodeName(f"n{index}"), Resources(1000 * cpu, memory, 1000 * gpu), accelerator, here or index % 3 > 0)
        for index, (cpu, gpu, memory, accelerator, here) in enumerate(draw(st.lists(kinds, min_size=1, max_size=9)))
    )
    tasks = draw(st.lists(st.tuples(st.integers(0, len(nodes)), st.sampled_from(DEMANDS)), max_size=14))
    return nodes, [(NodeName(f"n{at}"), demand) for at, demand in tasks]


@given(
    cluster=clusters(),
    rule=st.sampled_from(["spread", "pack", "consolidate"]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["confirm", "release", "take", "take", "take", "give_back"]),
            st.integers(0, 20),
            st.sampled_from(DEMANDS),
            st.sampled_from(ALLOWED),
        ),
        max_size=25,
    ),
    owns=st.sets(st.integers(0, 9)),
)
@example(  # what was granted is given back between the first looks for two demands
    cluster=(
        (Node(NodeName("n0"), Resources(1000, 9)), Node(NodeName("n1"), Resources(5000, 8))),
        [(NodeName("n0"), DEMANDS[0])],
    ),
    rule="spread",
    steps=[
        ("confirm", 0, DEMANDS[0], ()),
        ("take", 0, DEMANDS[0], ()),
        ("release", 0, DEMANDS[0], ()),
        ("take", 0, DEMANDS[2], ()),
    ],
    owns=set(),
)
@settings(deadline=None, max_examples=200)
def test_the_best_node_is_the_one_that_a_look_at_every_task_and_node_finds(
    cluster: tuple[tuple[Node, ...], list[tuple[NodeName, Resources]]],
    rule: Rule,
    steps: list[tuple[str, int, Resources, tuple[str, ...]]],
    owns: set[int],
) -> None:
    """A node that is remembered as better than it is would push running jobs from their places for nothing."""
    nodes, running = cluster
    entries = [([TaskPlacement(task_name(Role.WORKER, 0), name)], amount_of(demand)) for name, demand in running]
    rooms = Vacancies(nodes, entries, rule, Random(0))
    plain = Plain(nodes, rule, list(running))
    names = {node.name for node in nodes}
    own = {NodeName(f"n{at}") for at in owns} & names if rule == "consolidate" else set()
    confirmed: list[tuple[NodeName, Resources]] = []
    new: list[tuple[NodeName, Resources]] = []
    for step, number, demand, allowed in steps:
        there = [task for task in plain.running if task[0] in names and rooms.fits(task[0], amount_of(task[1]))]
        if step == "confirm" and there:
            task = there[number % len(there)]
            rooms.confirm([TaskPlacement(task_name(Role.WORKER, 0), task[0])], amount_of(task[1]))
            plain.running.remove(task)
            plain.granted.append(task)
            confirmed.append(task)
        elif step == "release" and confirmed:
            task = confirmed.pop(number % len(confirmed))
            rooms.release(task[0], amount_of(task[1]))
            plain.granted.remove(task)
            plain.running.append(task)
        elif step == "give_back" and new:
            task = new.pop(number % len(new))
            rooms.give_back(task[0], amount_of(task[1]))
            plain.granted.remove(task)
        elif step == "take":
            chosen = rooms.choose(amount_of(demand), allowed, own)
            assert chosen == plain.choose(demand, allowed, own)
            if chosen is None:
                assert not rooms.could_hold(amount_of(demand), 1, allowed)
                continue
            assert rooms.could_hold(amount_of(demand), 1, allowed)
            rooms.take(chosen, amount_of(demand))
            plain.granted.append((chosen, demand))
            new.append((chosen, demand))
        for name, _ in plain.running:
            if rooms.all_can_stay([TaskPlacement(task_name(Role.WORKER, 0), name)]):
                assert plain.can_stay(name)
