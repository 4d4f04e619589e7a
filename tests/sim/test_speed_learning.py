"""Learning speeds in simulation: the workload where workers matter, training, yardsticks, what deciding costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.cli.main import main
from fedsched.config import parse
from fedsched.core.job import Allocation
from fedsched.policy import speed_checkpoint
from fedsched.policy.learned_speed import LearnedSpeedOptions
from fedsched.policy.speed_checkpoint import SpeedCheckpoint
from fedsched.sim import decision_pace
from fedsched.sim.elastic_workload import ElasticSpeeds, ElasticWorkloadConfig
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.ports import Setting
from fedsched.sim.speed_training import judge, train


def small(**changes: Any) -> ExperimentConfig:
    plain: dict[str, Any] = {
        "clusters": [{"name": "small", "nodes": [{"name": "node", "cpus": 48, "gpus": 8, "count": 4}]}],
        "workload": {"kind": "elastic", "jobs": 40, "rate": 0.5},
        "policies": {"learned": {"name": "learned_speed"}},
        "slot_length_s": 1200,
        "costs": {"preset": "free"},
        "keep_running": False,
        **changes,
    }
    return parse(ExperimentConfig, plain, "the test")


def test_jobs_of_both_kinds_take_the_drawn_time_as_they_were_drawn() -> None:
    """Work that did not match the durations would make the trace's mix of short and long jobs meaningless."""
    config = ElasticWorkloadConfig(kind="elastic", jobs=100)
    records = list(config.workload()._arrivals.records(3))
    jobs, speeds = list(config.workload().draw(3)), ElasticSpeeds()

    assert [job.spec.submitted_s for job in jobs] == [record.submit_s for record in records]
    served = [job for job in jobs if job.spec.ps.maximum]
    assert 30 < len(served) < 70
    for job, record in zip(jobs, records, strict=True):
        workers = 1 if job in served else max(1, min(32, round(record.num_gpu)))
        setting = Setting(Allocation(workers, int(job in served)), nodes=-(-workers // 8))
        taken_s = job.epochs / speeds.epochs(job, setting, 1.0)
        assert taken_s == pytest.approx(record.duration_s, rel=0.05, abs=60)


def test_training_twice_gives_the_same_file_and_brings_jcts_near_the_greedy_that_knows() -> None:
    """A checkpoint that nobody can make again proves nothing."""
    options = LearnedSpeedOptions(explore=1.0)
    first, runs = train([small()], options, seed=50, runs=3)
    second, _ = train([small()], options, seed=50, runs=3)

    assert SpeedCheckpoint(first, {}).to_bytes() == SpeedCheckpoint(second, {}).to_bytes()
    assert [run.seed for run in runs] == [50, 51, 52]
    learned, greedy, bound = judge(small(), first, options, range(2))
    assert learned.jct_s.mean <= 1.1 * greedy.jct_s.mean
    assert bound.jct_s.mean < greedy.jct_s.mean


def test_clusters_of_one_run_learn_apart_and_are_added_up() -> None:
    """What a federation knows after a run is what its clusters saw, each job once."""
    node = {"name": "node", "cpus": 48, "gpus": 8, "count": 2}
    two = small(clusters=[{"name": "a", "nodes": [node]}, {"name": "b", "nodes": [node]}])

    statistics, (run,) = train([two], LearnedSpeedOptions(), seed=1, runs=1)

    assert run.observations == statistics.observations > 40


def test_the_shipped_statistics_are_whole_and_say_how_to_make_them_again() -> None:
    """The first thing that an operator asks of a learned policy is where it comes from."""
    shipped = speed_checkpoint.load(speed_checkpoint.BUILTIN)

    assert str(shipped.made["command"]).startswith("fedsched train speeds mixed.yaml")
    assert len(shipped.statistics) > 500


def test_speeds_are_trained_and_merged_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sites learn, exchange files, and both orders of merging give the same."""
    experiment = tmp_path / "e.yaml"
    experiment.write_text(
        "clusters: [{name: c, nodes: [{name: n, cpus: 48, gpus: 8}]}]\n"
        "workload: {kind: elastic, jobs: 6}\n"
        "policies: {learned: {name: learned_speed}}\n"
        "slot_length_s: 1200\ncosts: {preset: free}\n"
    )
    for seed in ("1", "2"):
        assert main(["train", "speeds", str(experiment), str(tmp_path / seed), "--runs", "1", "--seed", seed]) == 0
    one, two = str(tmp_path / "1"), str(tmp_path / "2")

    for names, out in (((one, two), "ab"), ((two, one), "ba")):
        assert main(["policy", "merge", *names, str(tmp_path / out)]) == 0
    damaged = tmp_path / "damaged"
    damaged.write_bytes((tmp_path / "1").read_bytes()[:-9])
    refused = main(["policy", "merge", one, str(damaged), str(tmp_path / "c")])

    assert (tmp_path / "ab").read_bytes() == (tmp_path / "ba").read_bytes()
    assert refused == 1
    assert "is no whole file of statistics" in capsys.readouterr().err


def test_a_training_of_speeds_goes_on_where_it_was_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """One run after the other or all in one go: the same observations, in the same order."""
    experiment = tmp_path / "e.yaml"
    experiment.write_text(
        "clusters: [{name: c, nodes: [{name: n, cpus: 48, gpus: 8}]}]\n"
        "workload: {kind: elastic, jobs: 6}\n"
        "policies: {learned: {name: learned_speed}}\n"
        "slot_length_s: 1200\ncosts: {preset: free}\n"
    )

    def teach(name: str, *options: str) -> int:
        return main(["train", "speeds", str(experiment), str(tmp_path / name), "--seed", "7", *options])

    assert teach("whole", "--runs", "3") == 0
    assert teach("parts", "--runs", "1") == 0
    assert teach("parts", "--runs", "3") == 2, "an older training's files are in the way"
    assert teach("parts", "--runs", "3", "--resume", "--explore", "2") == 2, "another recipe"
    assert teach("parts", "--runs", "3", "--resume") == 0

    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()
    log = (tmp_path / "whole.csv").read_text()
    assert log == (tmp_path / "parts.csv").read_text()
    assert [line.split(",")[:2] for line in log.splitlines()[1:]] == [["1", "7"], ["2", "8"], ["3", "9"]]


def test_what_deciding_costs_is_measured_for_every_size_and_policy() -> None:
    """The promise of a few milliseconds a slot is checked by a command that everybody can run."""
    paces = decision_pace.measure(["learned_speed"], slots=3)

    assert [(pace.jobs, pace.servers, pace.policy) for pace in paces] == [
        (40, 80, "learned_speed"),
        (200, 500, "learned_speed"),
    ]
    assert all(0 < pace.p50_ms <= pace.p99_ms for pace in paces)
