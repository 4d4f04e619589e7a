"""Clusters that have jobs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.config import parse
from fedsched.errors import InvalidConfiguration
from fedsched.sim.experiment import ExperimentConfig, load_experiment
from fedsched.sim.local_workloads import LocalWorkloads, LocalWorkloadsConfig

SHIPPED = Path(__file__).parents[2] / "simulations" / "experiments" / "federated_speedup.yaml"
EAST: dict[str, Any] = {"jobs": 6, "gap_s": 40}
WEST: dict[str, Any] = {"kind": "dl2", "pattern": "uniform", "jobs": 9, "arrivals_max": 2, "slot_length_s": 50}


def declared(**clusters: Any) -> LocalWorkloads:
    return LocalWorkloads(parse(LocalWorkloadsConfig, {"kind": "local", "clusters": clusters}, "the test"))


def test_every_clusters_jobs_come_in_one_order_and_know_where_they_belong() -> None:
    jobs = list(declared(east=EAST, west=WEST).draw(3))

    assert [job.spec.submitted_s for job in jobs] == sorted(job.spec.submitted_s for job in jobs)
    assert len({job.spec.job_id for job in jobs}) == len(jobs) == 15
    assert [sum(job.origin == name for job in jobs) for name in ("east", "west")] == [6, 9]
    assert all(job.spec.job_id.startswith(f"{job.origin}-") for job in jobs)


def test_a_clusters_jobs_do_not_depend_on_what_its_neighbour_runs() -> None:
    """Else a comparison of federations would compare workloads."""
    busy = {**WEST, "jobs": 30}
    first = [job for job in declared(east=EAST, west=WEST).draw(3) if job.origin == "east"]
    second = [job for job in declared(east=EAST, west=busy).draw(3) if job.origin == "east"]
    assert first == second
    assert first != [job for job in declared(east=EAST, west=WEST).draw(4) if job.origin == "east"]


def test_a_workload_of_a_cluster_that_is_not_there_is_refused() -> None:
    plain = {
        "clusters": [{"name": "east", "nodes": [{"name": "node", "cpus": 8}]}],
        "workload": {"kind": "local", "clusters": {"east": EAST, "wast": EAST}},
        "policies": {"drf": {"name": "drf"}},
    }
    with pytest.raises(InvalidConfiguration, match="the workload names wast; clusters are east"):
        parse(ExperimentConfig, plain, "the test")
    local = {"kind": "local", "clusters": {"east": {"kind": "trace"}}}
    with pytest.raises(InvalidConfiguration, match="no such kind of local workload"):
        parse(ExperimentConfig, {**plain, "workload": local}, "the test")


def test_the_shipped_speedup_experiment_has_the_same_jobs_for_every_size_of_federation() -> None:
    experiment = load_experiment(SHIPPED)
    assert experiment.training is not None
    together = {name: row.together for name, row in experiment.training.policies.items()}
    alone = {"alone": 1, "alone_far": 1, "alone_alike": 1}
    assert together == {**alone, "pairs": 2, "pairs_gated": 2, "fours": 4, "eight": 8, "gated": 8}
    origins = {job.origin for job in experiment.jobs().draw(experiment.seed)}
    assert sorted(origins) == [cluster.name for cluster in experiment.clusters]
