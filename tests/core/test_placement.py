"""Placement against a dumb oracle, and what a budget promises."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from fedsched.core.choosing import Rule
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import (
    Allocation,
    Placement,
    Range,
    Role,
    TaskPlacement,
    allocation_of,
    coordinator_of,
    task_name,
)
from fedsched.core.placement import TentativePlacement, place
from fedsched.core.resources import Resources
from tests.core.world import node


def view(
    name: str, *, workers: tuple[int, int] = (1, 4), ps: tuple[int, int] = (1, 2), cpu: int = 1, **changes: object
) -> JobView:
    demand = Resources(cpu_milli=cpu * 1000)
    fields: dict[str, object] = {
        "job_id": JobId(name),
        "job_type": "t",
        "workers": Range(*workers),
        "ps": Range(*ps),
        "worker_demand": demand,
        "ps_demand": demand,
        "epochs": 1.0,
        "progress_epochs": 0.0,
        "arrived_s": 0.0,
        "waited_slots": 0,
        **changes,
    }
    return JobView(**fields)  # type: ignore[arg-type]


def fits_by_brute_force(capacities: list[int], tasks: list[int]) -> bool:
    """Every way to put every task on some node."""
    for nodes in itertools.product(range(len(capacities)), repeat=len(tasks)):
        left = list(capacities)
        for task, chosen in zip(tasks, nodes, strict=True):
            left[chosen] -= task
        if min(left) >= 0:
            return True
    return False


@given(
    capacities=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    grants=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), max_size=6),
)
def test_what_is_granted_fits_on_real_nodes_and_equal_tasks_are_never_refused_wrongly(
    capacities: list[int], grants: list[tuple[int, int, int]]
) -> None:
    """A grant is a promise; a refusal with room to spare is an idle machine."""
    nodes = tuple(node(f"n{i}", cpus) for i, cpus in enumerate(capacities))
    jobs = tuple(view(f"j{i}", workers=(1, 9), ps=(0, 9)) for i in range(3))
    budget = TentativePlacement(Observation(0, 1.0, nodes, jobs))
    for index, workers, ps in grants:
        job_id = JobId(f"j{index}")
        before = budget.allocation(job_id)
        held = sum(size.workers + size.ps for _, size in budget.allocations())
        granted = budget.grant(job_id, workers, ps)
        may = workers + ps > 0 and before.workers + workers >= 1
        assert granted == (may and fits_by_brute_force(capacities, [1] * (held + workers + ps)))
        after = Allocation(workers, ps) + before if granted else before
        assert budget.allocation(job_id) == after
        assert allocation_of(budget.placement(job_id)) == after
    for machine in nodes:
        used = sum(entry.node == machine.name for job in jobs for entry in budget.placement(job.job_id))
        assert used * 1000 <= machine.capacity.cpu_milli


@st.composite
def running_clusters(draw: st.DrawFn) -> Observation:
    """Clusters with jobs of unequal demands, some of them running on nodes that can hold them."""
    capacities = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    nodes = tuple(node(f"n{i}", cpus, schedulable=draw(st.booleans()) or i == 0) for i, cpus in enumerate(capacities))
    left = list(capacities)
    jobs = []
    for number in range(draw(st.integers(0, 4))):
        cpu = draw(st.integers(1, 3))
        placement: list[TaskPlacement] = []
        for role, count in ((Role.WORKER, draw(st.integers(0, 3))), (Role.PS, draw(st.integers(0, 2)))):
            for index in range(count):
                chosen = draw(st.integers(0, len(nodes) - 1))
                if left[chosen] >= cpu:
                    left[chosen] -= cpu
                    placement.append(TaskPlacement(task_name(role, index), NodeName(f"n{chosen}")))
        size = allocation_of(tuple(placement))
        runs = size.workers >= 1 and size.ps >= 1
        settled: Placement = tuple(sorted(placement)) if runs else ()
        jobs.append(view(f"j{number}", cpu=cpu, placement=settled, pinned=runs and draw(st.booleans())))
        if not runs:
            for entry in placement:
                left[int(entry.node[1:])] += cpu
    return Observation(0, 1.0, nodes, tuple(jobs))


@given(observation=running_clusters(), data=st.data(), keep_running=st.booleans())
def test_a_placed_decision_never_overfills_a_node_splits_a_minimum_or_touches_a_pinned_job(
    observation: Observation, data: st.DataObject, keep_running: bool
) -> None:
    sizes = st.tuples(st.integers(0, 6), st.integers(0, 4))
    wanted = [(job.job_id, Allocation(*data.draw(sizes))) for job in observation.jobs]
    budget = place(observation, wanted, keep_running)
    used = dict.fromkeys([machine.name for machine in observation.nodes], Resources())
    for job in observation.jobs:
        placement = budget.placement(job.job_id)
        size = allocation_of(placement)
        assert len({entry.task for entry in placement}) == len(placement)
        if job.pinned:
            assert placement == job.placement
            continue
        if keep_running and job.placement:
            assert size.workers >= job.minimum.workers
            assert size.ps >= job.minimum.ps
        if size:
            assert job.minimum.workers <= size.workers <= job.workers.maximum
            assert job.minimum.ps <= size.ps <= job.ps.maximum
        for entry in placement:
            used[entry.node] = used[entry.node] + job.worker_demand
            machine = next(m for m in observation.nodes if m.name == entry.node)
            assert machine.schedulable or entry in job.placement
    for job in observation.jobs:
        if job.pinned:
            for entry in job.placement:
                used[entry.node] = used[entry.node] + job.worker_demand
    for machine in observation.nodes:
        assert used[machine.name].fits_in(machine.capacity)


@given(observation=running_clusters())
def test_deciding_what_is_there_already_moves_nothing(observation: Observation) -> None:
    """A decision that changes no count must not cost anybody a resize."""
    wanted = [(job.job_id, allocation_of(job.placement)) for job in observation.jobs if job.placement]
    within = all(
        size.workers <= job.workers.maximum and size.ps <= job.ps.maximum
        for job, (_, size) in zip([job for job in observation.jobs if job.placement], wanted, strict=True)
    )
    budget = place(observation, wanted, True)
    if within:
        for job in observation.jobs:
            assert budget.placement(job.job_id) == job.placement


@given(observation=running_clusters())
def test_asking_whether_a_job_would_fit_grants_nothing(observation: Observation) -> None:
    budget = TentativePlacement(observation, keep_running=False)
    before = (budget.allocations(), budget.free())
    for job in observation.jobs:
        fits = budget.would_fit(job.job_id)
        assert (budget.allocations(), budget.free()) == before
        if fits:
            fresh = TentativePlacement(observation, keep_running=False)
            assert fresh.grant(job.job_id, job.minimum.workers, job.minimum.ps)


def test_a_job_runs_only_on_accelerators_that_it_named() -> None:
    from msgspec.structs import replace

    nodes = (node("cpu", 8), replace(node("gpu", 2), accelerator="T4"))
    job = view("a", accelerators=("V100", "T4"))
    budget = TentativePlacement(Observation(0, 1.0, nodes, (job,)))
    assert budget.grant(job.job_id, workers=1, ps=1)
    assert {entry.node for entry in budget.placement(job.job_id)} == {"gpu"}
    assert not budget.grant(job.job_id, workers=1)


@given(
    capacities=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    worker=st.integers(1, 4),
    ps=st.integers(1, 4),
    size=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    coordinator=st.integers(0, 2),
)
def test_a_minimum_that_fits_in_any_way_is_granted(
    capacities: list[int], worker: int, ps: int, size: tuple[int, int], coordinator: int
) -> None:
    """The controller admits a job that can be packed; a placement that cannot would let it wait for ever."""
    nodes = tuple(node(f"n{i}", cpus) for i, cpus in enumerate(capacities))
    job = view(
        "a",
        workers=(size[0], size[0]),
        ps=(size[1], size[1]),
        worker_demand=Resources(cpu_milli=worker * 1000),
        ps_demand=Resources(cpu_milli=ps * 1000),
        coordinator_demand=Resources(cpu_milli=coordinator * 1000),
    )
    budget = TentativePlacement(Observation(0, 1.0, nodes, (job,)))
    tasks = [worker] * size[0] + [ps] * size[1] + [coordinator]
    assert budget.would_fit(job.job_id) == fits_by_brute_force(capacities, tasks)
    assert budget.grant(job.job_id, *size) == fits_by_brute_force(capacities, tasks)
    placed = budget.placement(job.job_id)
    assert len(coordinator_of(placed)) == bool(placed and coordinator)
    cpus = {Role.WORKER: worker, Role.PS: ps, Role.COORDINATOR: coordinator}
    for machine in nodes:
        taken = [cpus[entry.role] for entry in placed if entry.node == machine.name]
        assert sum(taken) * 1000 <= machine.capacity.cpu_milli


def chosen_by_looking_at_every_node(
    seen: Observation, budget: TentativePlacement, asks: JobView, rule: str
) -> NodeName | None:
    """Where one more worker of a job without any task goes, by the rule's own words."""
    used = {one.name: Resources() for one in seen.nodes}
    soft = dict(used)
    for job in seen.jobs:
        granted = budget.placement(job.job_id)
        for entry in granted:
            used[entry.node] = used[entry.node] + job.worker_demand
        for entry in set(job.placement) - set(granted):
            soft[entry.node] = soft[entry.node] + job.worker_demand
    ranked = []
    for one in seen.nodes:
        free = one.capacity - used[one.name]
        if not one.schedulable or not asks.worker_demand.fits_in(free):
            continue
        after = (used[one.name] + asks.worker_demand).dominant_share(one.capacity)
        rank = (after,) if rule == "spread" else (free.gpu_milli, free.cpu_milli, free.memory_mib)
        ranked.append((not asks.worker_demand.fits_in(free - soft[one.name]), *rank, one.name))
    return NodeName(str(min(ranked)[-1])) if ranked else None


@given(
    capacities=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    running=st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=5),
    grants=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=5),
    rule=st.sampled_from(["spread", "pack", "consolidate"]),
)
def test_the_node_for_a_task_is_the_one_that_a_look_at_every_node_finds(
    capacities: list[int], running: list[list[int]], grants: list[tuple[int, int]], rule: Rule
) -> None:
    """Choosing among groups of like nodes makes a cluster of hundreds affordable; it must not choose others."""
    nodes = tuple(node(f"n{i}", cpus) for i, cpus in enumerate(capacities))
    jobs = []
    for number, where in enumerate(running):
        entries = [TaskPlacement(task_name(Role.WORKER, i), nodes[at % len(nodes)].name) for i, at in enumerate(where)]
        jobs.append(view(f"j{number}", workers=(1, 9), ps=(0, 0), cpu=1 + number % 2, placement=tuple(entries)))
    asks = view("newcomer", workers=(1, 9), ps=(0, 0))
    seen = Observation(0, 1.0, nodes, (*jobs, asks))
    budget = TentativePlacement(seen, keep_running=False, rule=rule)
    for number, workers in grants:
        budget.grant(JobId(f"j{number}"), workers=workers)

    expected = chosen_by_looking_at_every_node(seen, budget, asks, rule)

    assert budget.grant(asks.job_id, workers=1) == (expected is not None)
    assert [entry.node for entry in budget.placement(asks.job_id)] == ([expected] if expected is not None else [])


@given(
    capacities=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    workers=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    servers=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    others=st.integers(0, 6),
)
def test_a_bundle_keeps_the_first_running_task_of_each_role_that_still_has_room(
    capacities: list[int], workers: list[int], servers: list[int], others: int
) -> None:
    """A task that moves without need stops a training; one that stays where others are now overfills a node."""
    nodes = tuple(node(f"n{i}", cpus) for i, cpus in enumerate(capacities))
    ran = [(Role.PS, i, at) for i, at in enumerate(servers)] + [(Role.WORKER, i, at) for i, at in enumerate(workers)]
    job = view(
        "a",
        workers=(1, 9),
        ps=(0, 9),
        ps_demand=Resources(cpu_milli=2000),
        placement=tuple(TaskPlacement(task_name(role, i), NodeName(f"n{at}")) for role, i, at in ran),
    )
    other = view("b", workers=(1, 9), ps=(0, 0))
    budget = TentativePlacement(Observation(0, 1.0, nodes, (job, other)), keep_running=False)
    budget.grant(other.job_id, others)
    free = {one.name: one.capacity.cpu_milli // 1000 for one in nodes}
    for entry in budget.placement(other.job_id):
        free[entry.node] -= 1
    waiting = {role: [entry for entry in job.placement if entry.role is role] for role in Role}
    while True:
        stays, left = [], dict(free)
        for role, needs in ((Role.WORKER, 1), (Role.PS, 2)):
            fits = [entry for entry in waiting[role] if left.get(entry.node, 0) >= needs]
            stays += fits[:1]
            if fits:
                left[fits[0].node] -= needs
        if len(stays) < 2:
            break
        before = set(budget.placement(job.job_id))
        assert budget.grant(job.job_id, workers=1, ps=1)
        assert set(budget.placement(job.job_id)) - before == set(stays)
        free = left
        for entry in stays:
            waiting[entry.role].remove(entry)
