"""Declared simulations: files that are checked as a whole, fair comparisons, results within their bands."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from pydantic import Field

from fedsched.config import Name, PolicyConfig, Tree, load, parse
from fedsched.core.cluster import Node
from fedsched.core.decision import Budget, Decision, Observation
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.errors import CorruptCheckpoint, InvalidConfiguration, InvalidInput
from fedsched.policy import checkpoint
from fedsched.policy.registry import heuristic, make
from fedsched.sim.comparing import summarise
from fedsched.sim.experiment import ExperimentConfig, files_of, load_experiment, with_policies
from fedsched.sim.results import RunResult
from fedsched.sim.running import Request, make_policy, perform
from fedsched.sim.workload import Scenario, WorkloadConfig, draw_jobs, draw_scenario
from fedsched.sim.world import CLUSTER, Result, run_scenario

SIMULATIONS = Path(__file__).parents[2] / "simulations"
EXPERIMENTS = sorted((SIMULATIONS / "experiments").glob("*.yaml"))


NODE = {"name": "n", "cpus": 1.5}
BIG = {"name": "n", "cpus": 6}


class Band(Tree):
    """Where a result must lie, ends included."""

    low: float
    high: float


class PolicyBands(Tree):
    mean_jct_s: Band
    makespan_s: Band


class Expected(Tree):
    """A file under simulations/expected."""

    policies: dict[Name, PolicyBands] = Field(min_length=1)


def tiny(**changes: object) -> ExperimentConfig:
    """Three short jobs on one machine, under DRF."""
    plain = {
        "clusters": [{"name": CLUSTER, "nodes": [{"name": "n", "cpus": 6}]}],
        "workload": {"jobs": 3, "gap_s": 5, "alone_s_max": 40},
        "policies": {"drf": {"name": "drf"}},
        "seeds": 2,
    }
    return parse(ExperimentConfig, {**plain, **changes}, "test")


def run_all(experiment: ExperimentConfig, *labels: str) -> list[RunResult]:
    """These policies, or all, on every seed, with all judges watching."""
    experiment, wanted = with_policies(experiment, labels)
    seeds = range(experiment.seed, experiment.seed + experiment.seeds)
    return [perform(Request("test", experiment, label, seed, check=True)) for label in wanted for seed in seeds]


# --- The files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_shipped_experiment_is_valid(path: Path) -> None:
    """The first thing that a newcomer runs must not be an error."""
    assert load_experiment(path).policies


@pytest.mark.parametrize("path", sorted((SIMULATIONS / "expected").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_of_bands_has_one_for_each_policy_of_its_experiment(path: Path) -> None:
    """An experiment that nobody knows the result of cannot tell when something breaks."""
    experiment = load_experiment(SIMULATIONS / "experiments" / path.name)
    assert sorted(load(Expected, path).policies) == sorted(experiment.policies)


def test_all_problems_of_all_three_files_are_told_at_once(tmp_path: Path) -> None:
    """Whoever corrects one line per try gives up."""
    (tmp_path / "clusters.yaml").write_text("[{name: x, nodes: [{name: a, cpu: 4}, {name: b, cpus: -1}]}]\n")
    (tmp_path / "workload.yaml").write_text("gap_s: 5\njob_types: [cnn, gnn]\nalone_s_min: 9\nalone_s_max: 3\n")
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "clusters: clusters.yaml\nworkload: workload.yaml\nsede: 3\n"
        "policies: {drf: {name: drff}, dl2: {explor: true}}\ncosts: {scale_s: -1}\n"
    )
    with pytest.raises(InvalidConfiguration) as caught:
        load_experiment(path)
    message = str(caught.value)
    assert "clusters.0.nodes.0.cpu is not a known field; did you mean cpus?" in message
    assert "clusters.0.nodes.0.cpus is missing" in message
    assert "clusters.0.nodes.1.cpus is -1" in message
    assert "workload.job_types.1: no speed is known for job type gnn; known are cnn, embedding" in message
    assert "policies.drf.name is 'drff'" in message
    assert "policies.dl2.explor is not a known field; did you mean explore?" in message
    assert "costs.scale_s is -1" in message
    assert "sede is not a known field; did you mean seed?" in message


def test_files_that_cannot_be_read_are_problems_like_all_others(tmp_path: Path) -> None:
    """Both missing files in one go, and where they were looked for."""
    path = tmp_path / "experiment.yaml"
    path.write_text("clusters: no/cluster.yaml\nworkload: bad.yaml\npolicies: {}\n")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(InvalidConfiguration) as caught:
        load_experiment(path)
    message = str(caught.value)
    assert f"clusters: cannot read {tmp_path}/no/cluster.yaml: No such file" in message
    assert f"workload: {tmp_path}/bad.yaml is not YAML" in message
    assert "policies is {}" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"clusters": [{"name": "c", "nodes": [NODE] * 2}]}, "node names must be unique; used more than once: n"),
        ({"clusters": [{"name": "c", "nodes": [NODE]}] * 2}, "cluster names must be unique; used more than once: c"),
        ({"clusters": [{"name": "c", "nodes": [NODE]}]}, "no cluster can hold the workload's largest worker"),
        ({"clusters": [{"name": "c", "nodes": [BIG], "policy": "x"}]}, "cluster c has policy x; policies are drf"),
        ({"workload": {"gap_s": 1, "alone_s_min": 9, "alone_s_max": 3}}, "alone_s_min is 9.0; it must not be above"),
        ({"federation": {"together": {"drf": 2}}}, "federation.together names drf, which is drf and learns nothing"),
    ],
)
def test_relations_are_checked_before_anything_runs(changes: dict[str, object], expected: str) -> None:
    """A job that can never start would keep the simulation going until it gives up."""
    with pytest.raises(InvalidConfiguration, match=expected):
        tiny(**changes)


def test_a_checkpoint_lies_where_the_experiment_says_not_where_the_user_stands(tmp_path: Path) -> None:
    """An experiment must mean the same from every directory."""
    for part in ("clusters", "workloads", "experiments"):
        shutil.copytree(SIMULATIONS / part, tmp_path / part)
    path = tmp_path / "experiments" / "own.yaml"
    path.write_text(
        "clusters: ../clusters/small.yaml\nworkload: ../workloads/mixed.yaml\nseeds: 1\n"
        "policies: {drf: {name: drf}, mine: {name: dl2, checkpoint: ../mine.safetensors}}\n"
    )
    with pytest.raises(CorruptCheckpoint, match=r"mine\.safetensors"):
        make_policy(load_experiment(path).policies["mine"], 0)
    shutil.copy(checkpoint.BUILTIN, tmp_path / "mine.safetensors")
    config = load_experiment(path).policies["mine"]
    assert checkpoint.load(Path(config.checkpoint)).digest == checkpoint.load(checkpoint.BUILTIN).digest


def test_an_experiment_like_another_differs_in_what_it_says(tmp_path: Path) -> None:
    """The same conditions, written down once: a copy of them would drift apart."""
    path = tmp_path / "own.yaml"
    shutil.copytree(SIMULATIONS / "clusters", tmp_path / "clusters")
    (tmp_path / "base.yaml").write_text(
        "clusters: clusters/small.yaml\nworkload: {jobs: 3, gap_s: 5}\npolicies: {drf: {name: drf}, a: {name: fifo}}\n"
    )
    path.write_text("like: base.yaml\nseeds: 7\npolicies: {drf: {name: drf}}\n")
    own, base = load_experiment(path), load_experiment(tmp_path / "base.yaml")
    assert (own.seeds, list(own.policies)) == (7, ["drf"])
    assert own.model_copy(update={"seeds": base.seeds, "policies": base.policies}) == base
    assert {found.resolve() for found in files_of(path)} >= {
        path,
        tmp_path / "base.yaml",
        tmp_path / "clusters" / "small.yaml",
    }, "what is written must not be written over any of them"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gone.yaml", "cannot read"),
        ("../base.yaml", "like is '../base.yaml'"),
        ("5", "like is 5"),
        ("own.yaml", "which is like another itself"),
        ("list.yaml", "which is no experiment"),
    ],
)
def test_what_an_experiment_cannot_be_like_is_told(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "own.yaml").write_text(f"like: {name}\npolicies: {{drf: {{name: drf}}}}\n")
    (tmp_path / "list.yaml").write_text("[1, 2]\n")
    with pytest.raises(InvalidConfiguration, match=expected):
        load_experiment(tmp_path / "own.yaml")


# --- The workload ------------------------------------------------------------------------------------------------


def test_the_scenarios_that_the_shipped_weights_were_trained_on_are_still_drawn() -> None:
    """If they changed, `fedsched train supervised` would no longer reproduce the checkpoint that ships."""
    told = hashlib.sha256()
    for seed in range(40):
        scenario = draw_scenario(seed)
        told.update(f"{scenario.slot_length_s} {scenario.nodes!r}\n".encode())
        for spec in scenario.jobs:
            # A C library may round the last bit of a logarithm otherwise.
            told.update(
                f"{spec.job_id} {spec.name} {spec.job_type} {spec.workers} {spec.ps} {spec.worker_demand} "
                f"{spec.ps_demand} {spec.epochs:g} {spec.submitted_s:.6f}\n".encode()
            )
    assert told.hexdigest() == "1fa8beb3ca81b0a1e6554ef633fb2c1372bdc80f617926b9e54762fb213125cd"


def test_a_declared_workload_is_what_its_file_says() -> None:
    """Limits, lengths and the rate of arrivals are the experimenter's to choose."""
    workload = WorkloadConfig(
        jobs=400, gap_s=7, job_types=("vgg",), worker_cpus=(3.0,), ps_cpus=(0.25,), workers_max=2, ps_max=(5,)
    )
    jobs = draw_jobs(workload, 1)
    assert {(job.job_type, job.ps, job.worker_demand.cpu_milli, job.ps_demand.cpu_milli) for job in jobs} == {
        ("vgg", Range(1, 5), 3000, 250)
    }
    assert {job.workers for job in jobs} == {Range(1, 1), Range(1, 2)}
    assert jobs[0].submitted_s == 0.0
    assert jobs[-1].submitted_s / 399 == pytest.approx(7, rel=0.15)
    assert draw_jobs(workload, 1) == jobs != draw_jobs(workload, 2)


# --- Runs --------------------------------------------------------------------------------------------------------


def test_every_policy_gets_the_same_jobs_and_every_seed_others() -> None:
    """A policy that is compared on easier jobs wins for nothing."""
    experiment = tiny(policies={"first": {"name": "drf"}, "second": {"name": "drf"}, "fifo": {"name": "fifo"}})
    runs = run_all(experiment, "second", "first")
    assert [(run.policy, run.seed) for run in runs] == [("second", 0), ("second", 1), ("first", 0), ("first", 1)]
    assert [run.digest for run in runs[:2]] == [run.digest for run in runs[2:]]
    assert runs[0].digest != runs[1].digest


def test_a_sampling_policy_draws_anew_in_every_run() -> None:
    """Runs that share their draws are not independent, and the interval over them would be a lie."""
    workload = WorkloadConfig(jobs=8, gap_s=5)
    experiment = tiny(workload=workload.model_dump(), policies={"dl2": {"name": "dl2"}}, seed=1, seeds=1)
    nodes = (Node(NodeName("n"), Resources(6000, 4096)),)

    def with_draws_of(seed: int) -> str:
        scenario = Scenario(nodes, draw_jobs(workload, 1), experiment.slot_length_s)
        policy = make(PolicyConfig(seed=seed))
        return run_scenario(scenario, policy, heuristic("drf"), rules=experiment.rules()).digest

    (run,) = run_all(experiment)
    assert run.digest == with_draws_of(1) != with_draws_of(0)


def test_a_policy_that_the_experiment_lacks_is_named_with_what_was_meant() -> None:
    with pytest.raises(InvalidInput, match="there is no policy dfr; the experiment has drf") as caught:
        with_policies(tiny(), ["drf", "dfr"])
    assert "did you mean drf?" in str(caught.value)


class _Broken:
    """A policy that always fails."""

    name, version = "broken", 1

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        raise ArithmeticError("no")


def _alone(policy: _Broken) -> Result:
    one = Resources(1000, 100)
    job = JobSpec(JobId("a"), "a", "x", Range(2, 2), Range(1, 1), one, one, 12.0, job_type="cnn")
    scenario = Scenario((Node(NodeName("n"), Resources(4000, 4000)),), (job,), 10.0)
    return run_scenario(scenario, policy, heuristic("fifo"))


def test_slots_that_the_fallback_decided_are_counted() -> None:
    """Else a policy that always fails would be praised for what its fallback did."""
    result = _alone(_Broken())
    assert result.complete
    assert 0 < result.fallbacks <= result.slots


def test_any_policy_can_be_compared_without_writing_it_into_the_file() -> None:
    """A shipped experiment lists a few; whoever asks for another by its name means its defaults."""
    experiment, labels = with_policies(tiny(), ["srtf", "drf"])
    assert labels == ("srtf", "drf")
    assert experiment.policies["srtf"] == PolicyConfig(name="srtf")
    assert with_policies(tiny(), [])[1] == ("drf",)


def test_groups_of_nodes_are_many_nodes() -> None:
    """Nobody writes five hundred lines for five hundred equal machines."""
    nodes = [{"name": "big", "cpus": 8, "count": 3}, {"name": "odd", "cpus": 4}]
    (cluster,) = tiny(clusters=[{"name": "one", "nodes": nodes}]).clusters
    assert [node.name for node in cluster.all_nodes()] == ["big-00000", "big-00001", "big-00002", "odd"]


# --- Results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["dl2", "dl2-argmax", "drf", "fifo", "optimus", "srtf"])
def test_results_lie_within_their_bands(label: str) -> None:
    """A change that costs users time shows here, and so does one that is too good to be true."""
    bands = load(Expected, SIMULATIONS / "expected" / "small.yaml").policies[label]
    (summary,) = summarise(run_all(load_experiment(SIMULATIONS / "experiments" / "small.yaml"), label))
    assert summary.jct_s is not None
    assert summary.makespan_s is not None
    assert bands.mean_jct_s.low <= summary.jct_s.mean <= bands.mean_jct_s.high
    assert bands.makespan_s.low <= summary.makespan_s <= bands.makespan_s.high
    assert summary.fallbacks == 0
