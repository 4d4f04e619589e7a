"""The `speeds` section of an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.config import Tree, load, parse
from fedsched.core.job import Allocation
from fedsched.errors import InvalidConfiguration, NotFound
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.ports import TrueSpeeds
from fedsched.sim.speed import SPEEDS
from fedsched.sim.speeds.config import EstimatesConfig, SpeedsConfig
from fedsched.sim.speeds.recorded import RecordedSpeeds
from tests.sim.speeds.jobs import at, job


class Experiment(Tree):
    """As much of an experiment file as is needed here."""

    speeds: SpeedsConfig


def model(base: Path = Path(), seed: int = 0, **speeds: Any) -> TrueSpeeds:
    return parse(Experiment, {"speeds": speeds}, "here").speeds.model(seed, base)


def test_the_paper_workload_runs_on_the_measured_table_and_on_our_fit_of_it(data_dir: Path) -> None:
    """`dl2_paper` needs the data, `dl2_fitted` runs anywhere, and both tell the same story."""
    measured = model(form="measured", table=str(data_dir.resolve() / "dl2" / "speed.csv"))
    fitted = model(form="analytic", coefficients="dl2_fitted")
    for drawn in Dl2Workload(Dl2WorkloadConfig(jobs=30)).draw(0):
        one, other = measured.epochs(drawn, at(2, 4), 60.0), fitted.epochs(drawn, at(2, 4), 60.0)
        assert other == pytest.approx(one, rel=0.35)


def test_every_form_can_be_written_in_yaml(tmp_path: Path) -> None:
    """The section is what researchers change; it must read like the README says."""
    (tmp_path / "mine.yaml").write_text("curves: {any: [2.0, 0, 0, 0, 0]}\n")
    (tmp_path / "mine.csv").write_text("model,ps,worker,samples_per_sec\nany,1,1,3\nany,1,2,4\n")
    (tmp_path / "experiment.yaml").write_text(
        """
        speeds:
          form: measured
          table: mine.csv
          epoch_samples: {any: 6}
          spread: {cost: 0.5, by_type: {other: 1}}
          interference: {cost: 0.1}
          stragglers: {probability: 0.0, slowdown_max: 3}
        """
    )
    written = load(Experiment, tmp_path / "experiment.yaml").speeds.model(base=tmp_path)
    assert written.epochs(job(), at(2, 1, nodes=2, neighbours=2), 3.0) == pytest.approx(4 * 3 / 6 / 1.25 / 1.1)
    assert model(tmp_path, form="analytic", coefficients="mine.yaml").epochs(job(), at(4), 1.0) == 2.0
    assert model(form="analytic", curves={"any": [1, 0, 0, 0, 0]}).epochs(job(), at(4), 1.0) == 4.0
    kinds = model(form="analytic")
    assert kinds.epochs(job("vgg"), at(2, 2), 1.0) == SPEEDS["vgg"](Allocation(2, 2))
    assert model(form="recorded").epochs(job(), at(16), 5.0) == 5.0
    scaled = model(form="scaling", otherwise="bert (batch size 64)", epoch_iterations={"any": 10})
    assert scaled.epochs(job(gpus=1), at(2, on="A100"), 1.0) == pytest.approx(0.9, abs=0.1)
    assert model(form="goodput").epochs(job("bert", gpus=1), at(2, on="A100"), 3600.0) > 0


def test_noise_and_stragglers_follow_the_seed_of_the_run() -> None:
    """Two seeds are two worlds; one seed is one."""
    noisy: dict[str, Any] = {"form": "recorded", "noise": 0.2, "stragglers": {"probability": 0.5, "slowdown_max": 2}}
    speeds = [model(seed=seed, **noisy).epochs(job(), at(16), 1.0) for seed in (1, 1, 2)]
    assert speeds[0] == speeds[1] != speeds[2]


def test_estimates_err_only_where_asked_to_and_the_truth_stays() -> None:
    """A policy that is robust to wrong estimates is found by making them worse, and nothing else."""
    workload, truth = Dl2Workload(Dl2WorkloadConfig(jobs=5)), RecordedSpeeds()
    right = EstimatesConfig()
    assert right.declared(workload) is workload
    assert right.told(truth, 1) is truth
    wrong = EstimatesConfig(length_error=0.2, speed_error=0.1)
    pairs = list(zip(workload.draw(1), wrong.declared(workload).draw(1), strict=True))
    assert all(one.epochs == other.epochs and one.spec.epochs != other.spec.epochs for one, other in pairs)
    assert 0.9 <= wrong.told(truth, 1).epochs(job(), at(16), 1.0) <= 1.1
    assert wrong.told(truth, 1).epochs(job(), at(16), 1.0) != 1.0
    with pytest.raises(InvalidConfiguration, match="speed_error is 1"):
        parse(EstimatesConfig, {"speed_error": 1.0}, "here")


@pytest.mark.parametrize(
    ("speeds", "problem"),
    [
        ({}, "form"),
        ({"form": "magic"}, "magic"),
        ({"form": "recorded", "exponent": 2}, "exponent is 2"),
        ({"form": "recorded", "noise": 1.0}, "noise is 1.0"),
        ({"form": "measured"}, "table is missing"),
        ({"form": "recorded", "spread": {"cost": -1}}, "cost is -1"),
        ({"form": "analytic", "curves": {"any": [0, 0, 1, 1, 1]}}, "takes no time on one worker"),
        ({"form": "scaling", "otherwis": "x"}, "otherwis is not a known field; did you mean otherwise"),
    ],
)
def test_contradictory_speeds_are_one_clear_error(speeds: dict[str, Any], problem: str) -> None:
    """A scenario that cannot be run says so before it runs."""
    with pytest.raises(InvalidConfiguration, match=problem):
        model(**speeds)


def test_a_missing_table_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured table is not ours to ship; whoever lacks it must learn where it comes from and what else will do."""
    monkeypatch.setenv("FEDSCHED_DATA", str(tmp_path))
    with pytest.raises(NotFound, match=r"(?s)FEDSCHED_DATA.*fedsched trace import.*_fitted"):
        model(form="measured", table="data:dl2/speed.csv")
    (tmp_path / "bad.yaml").write_text("curves: {A100: {any: [1, 2]}}\n")
    with pytest.raises(InvalidConfiguration, match=r"bad.yaml has \d+ problem"):
        model(tmp_path, form="scaling", coefficients="bad.yaml")
