"""Choosing a cluster: against brute force on tiny clusters, and rule by rule."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.cluster import ClusterRecord, Node
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import Allocation, JobSpec, Range, Reason
from fedsched.core.resources import Resources, total
from fedsched.core.routing import CandidateCluster, fits, impossible, largest, route

CPU, MIB = 1000, 1024


def job(workers: int = 1, ps: int = 1, *, cpus: int = 1, ps_cpus: int = 1, **more: object) -> JobSpec:
    """A job whose minimum is this many tasks; memory is never short."""
    return JobSpec(
        job_id=JobId("1"),
        name="job",
        run="true",
        workers=Range(workers, workers + 2),
        ps=Range(ps, ps),
        worker_demand=Resources(cpus * CPU, 1),
        ps_demand=Resources(ps_cpus * CPU, 1),
        epochs=1.0,
        **more,  # type: ignore[arg-type]
    )


def cluster(
    name: str, *cpus: int, used: int = 0, queued: int = 0, reachable: bool = True, **node: object
) -> CandidateCluster:
    """A cluster whose nodes have this many cores each."""
    nodes = tuple(
        Node(NodeName(f"{name}-{index}"), Resources(count * CPU, 64 * MIB), **node)  # type: ignore[arg-type]
        for index, count in enumerate(cpus)
    )
    record = ClusterRecord(
        ClusterName(name), 1, "host/1/1", "0", "host", 1, nodes, Resources(used * CPU, 0), 0, 0, "drf", 0, 0, 0.0
    )
    return CandidateCluster(ClusterName(name), record, reachable, Resources(), queued)


amounts = st.builds(Resources, st.integers(0, 4), st.integers(0, 4), st.integers(0, 2))
demands = st.builds(Resources, st.integers(1, 3), st.integers(0, 3), st.integers(0, 1))


def brute_force_fits(nodes: list[Node], spec: JobSpec, allocation: Allocation, coordinator: Resources) -> bool:
    """Try every way to put every task on every node; the coordinator needs no accelerator."""
    usable = [at for at, n in enumerate(nodes) if not spec.accelerators or n.accelerator in spec.accelerators]
    tasks = [spec.worker_demand] * allocation.workers + [spec.ps_demand] * allocation.ps + [coordinator]
    for places in itertools.product(*[usable] * (len(tasks) - 1), range(len(nodes))):
        loads = [total([task for task, at in zip(tasks, places, strict=True) if at == n]) for n in range(len(nodes))]
        if all(load.fits_in(node.capacity) for load, node in zip(loads, nodes, strict=True)):
            return True
    return False


@given(
    capacities=st.lists(st.tuples(amounts, st.sampled_from(["", "V100"])), min_size=1, max_size=3),
    worker=demands,
    ps=demands,
    workers=st.integers(1, 3),
    servers=st.integers(0, 2),
    accelerators=st.sampled_from([(), ("V100",), ("T4", "V100")]),
    coordinator=st.one_of(st.just(Resources()), amounts),
)
def test_a_job_fits_an_empty_cluster_exactly_when_some_arrangement_of_its_tasks_does(
    capacities: list[tuple[Resources, str]],
    worker: Resources,
    ps: Resources,
    workers: int,
    servers: int,
    accelerators: tuple[str, ...],
    coordinator: Resources,
) -> None:
    """A wrong no turns a user away for good; a wrong yes lets a job wait for ever."""
    nodes = [Node(NodeName(f"n{i}"), amount, kind) for i, (amount, kind) in enumerate(capacities)]
    spec = JobSpec(
        JobId("1"), "j", "true", Range(workers, workers), Range(servers, servers), worker, ps, 1.0,
        accelerators=accelerators,
    )  # fmt: skip
    allocation = Allocation(workers, servers)
    fitting = brute_force_fits(nodes, spec, allocation, coordinator)
    assert fits(nodes, spec, allocation, coordinator) == fitting


states = st.builds(
    cluster,
    st.sampled_from("abcdef"),
    st.integers(1, 6),
    st.integers(1, 6),
    used=st.integers(0, 8),
    queued=st.integers(0, 3),
    reachable=st.booleans(),
    schedulable=st.booleans(),
)


@given(
    found=st.lists(states, max_size=6, unique_by=lambda state: state.name),
    workers=st.integers(1, 6),
    wanted=st.lists(st.sampled_from("abcdefgh"), max_size=3, unique=True),
    ranked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_choice_is_the_best_cluster_that_will_do_in_whatever_order_they_are_listed(
    found: list[CandidateCluster], workers: int, wanted: list[str], ranked: bool, seed: int
) -> None:
    """Two controllers must choose alike, and nobody may wait while a better cluster stands free."""
    names = tuple(ClusterName(name) for name in wanted)
    spec = job(workers, clusters=names, clusters_ranked=ranked)
    shuffled = list(found)
    random.Random(seed).shuffle(shuffled)

    result = route(spec, shuffled)

    assert result == route(spec, found)
    able = [
        state
        for state in found
        if state.reachable
        and (not names or state.name in names)
        and state.record is not None
        and state.record.nodes[0].schedulable
        and fits(state.record.nodes, spec, spec.minimum)
    ]
    assert (result.choice is None) == (not able)
    assert {verdict.cluster for verdict in result.verdicts} == {state.name for state in found}
    if result.choice is not None:
        chosen = next(state for state in able if state.name == result.choice)
        assert _rank(spec, chosen) == min(_rank(spec, state) for state in able)
    else:
        assert result.reason is not Reason.NONE
        assert result.message


def _rank(spec: JobSpec, state: CandidateCluster) -> tuple[bool, int, float, int, str]:
    assert state.record is not None
    free = state.record.capacity - state.record.usage
    return (
        not spec.demand_of(spec.minimum).fits_in(free),
        spec.clusters.index(state.name) if spec.clusters and spec.clusters_ranked else 0,
        state.record.usage.dominant_share(state.record.capacity),
        state.queued,
        state.name,
    )


def test_two_clusters_that_are_large_enough_together_only_are_not_enough() -> None:
    """Kueue PR 10145: summed capacity hides that no single cluster fits, and the job waits for ever."""
    result = route(job(7, 0), [cluster("a", 4), cluster("b", 4)])
    assert result.reason is Reason.EXCEEDS_LARGEST_CLUSTER
    assert impossible(result)


def test_nodes_that_are_large_enough_together_only_are_not_enough() -> None:
    """A worker runs on one node: four cores on two nodes do not hold a worker of three and a server of one more."""
    result = route(job(1, 1, cpus=3, ps_cpus=2), [cluster("a", 3, 1, 1)])
    assert result.reason is Reason.EXCEEDS_LARGEST_CLUSTER
    assert "do not fit on its nodes" in result.message


def test_a_full_cluster_still_takes_a_job_when_it_is_the_only_one() -> None:
    """Its agent decides who gets what, and can only learn to from jobs that it sees."""
    result = route(job(2), [cluster("a", 4, used=4)])
    assert result.choice == "a"
    assert not result.verdicts[0].fits_now


def test_a_cluster_with_room_now_goes_before_the_users_first_choice_without() -> None:
    """`ordered` means cheap first, then overflow; it does not mean wait for the cheap one."""
    wish = job(2, clusters=(ClusterName("cheap"), ClusterName("dear")))
    assert route(wish, [cluster("cheap", 4), cluster("dear", 4)]).choice == "cheap"
    assert route(wish, [cluster("cheap", 4, used=3), cluster("dear", 4)]).choice == "dear"


def test_what_was_promised_to_waiting_jobs_counts_as_used() -> None:
    """Else a burst of submissions goes to one cluster before its agent has started any of them."""
    promised = cluster("a", 4)
    promised = CandidateCluster(promised.name, promised.record, True, Resources(3 * CPU, 0), 1)
    assert route(job(1, 1), [promised, cluster("b", 4, used=1)]).choice == "b"


def test_a_cluster_that_promised_more_than_it_has_is_said_to_have_nothing_free() -> None:
    """Whoever asks why a job waits must not be told of negative processors."""
    crowded = cluster("a", 4, used=4)
    crowded = CandidateCluster(crowded.name, crowded.record, True, Resources(3 * CPU, 0), 1)
    [verdict] = route(job(1, 1), [crowded]).verdicts
    assert (verdict.fits_now, verdict.free.cpu_milli) == (False, 0)
    assert verdict.message.startswith("must wait for capacity: 0 cpu")
    assert verdict.share == 7 / 4


def test_waiting_for_an_unreachable_cluster_is_said_even_when_another_is_too_small() -> None:
    """The job is not hopeless: its cluster may come back, so that is what the user must hear."""
    result = route(job(4, 0), [cluster("small", 2), cluster("big", 8, reachable=False)])
    assert result.reason is Reason.CLUSTER_UNREACHABLE
    assert not impossible(result)


def test_a_cluster_of_which_nothing_is_known_may_still_hold_the_job() -> None:
    """After a controller's restart an unreachable cluster's size is not known; refusing would be a guess."""
    unknown = CandidateCluster(ClusterName("gone"), None, False)
    assert not impossible(route(job(99), [unknown, cluster("small", 2)]))


def test_each_obstacle_has_its_own_reason() -> None:
    """Users act differently on each; one word for all of them is the complaint of every issue tracker."""
    assert route(job(), []).reason is Reason.NO_MATCHING_CLUSTER
    assert route(job(clusters=(ClusterName("x"),)), [cluster("a", 4)]).reason is Reason.NO_MATCHING_CLUSTER
    assert route(job(accelerators=("V100",)), [cluster("a", 4)]).reason is Reason.NO_MATCHING_ACCELERATOR
    assert route(job(5), [cluster("a", 4)]).reason is Reason.EXCEEDS_LARGEST_CLUSTER
    assert route(job(), [cluster("a", 4, schedulable=False)]).reason is Reason.CLUSTER_CORDONED
    assert route(job(), [cluster("a", 4, reachable=False)]).reason is Reason.CLUSTER_UNREACHABLE


def test_the_largest_cluster_is_named_by_what_it_holds() -> None:
    """The refusal names it, so that the user knows how far to go down."""
    assert largest([cluster("a", 4), cluster("b", 3, 3), CandidateCluster(ClusterName("c"), None, False)]).name == "b"
