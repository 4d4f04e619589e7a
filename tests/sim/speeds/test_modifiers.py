"""What makes jobs slower than their model says, and what makes estimates wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedsched.core.decision import JobView
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.speeds.costs import Costs, CostsConfig, VerbCosts
from fedsched.sim.speeds.declared import Misdeclared
from fedsched.sim.speeds.interference import Interference
from fedsched.sim.speeds.noise import NoisySpeeds
from fedsched.sim.speeds.oracle import oracle
from fedsched.sim.speeds.recorded import RecordedSpeeds
from fedsched.sim.speeds.spread import SpreadPenalty
from fedsched.sim.speeds.stragglers import Stragglers
from tests.sim.speeds.jobs import at, job

PLAIN = RecordedSpeeds()
FULL = 16
"""Workers of a test job, at which the plain model trains an epoch a second."""


def test_spreading_costs_by_the_share_of_traffic_that_leaves_its_node() -> None:
    """Consolidating placements are worth nothing in a simulator without this."""
    model = SpreadPenalty(PLAIN, 0.5, {"chatty": 1.0})
    assert model.epochs(job(), at(FULL), 10.0) == 10.0
    assert model.epochs(job(), at(FULL, nodes=2), 10.0) == pytest.approx(10 / 1.25)
    assert model.epochs(job("chatty"), at(FULL, nodes=4), 10.0) == pytest.approx(10 / 1.75)


def test_neighbours_cost_by_how_many_there_are_on_a_node() -> None:
    """The interference that DL2's paper speaks of and its code leaves out."""
    model = Interference(PLAIN, 0.1, {"robust": 0.0})
    assert model.epochs(job(), at(FULL), 10.0) == 10.0
    assert model.epochs(job(), at(FULL, neighbours=5), 10.0) == pytest.approx(10 / 1.5)
    assert model.epochs(job(), at(FULL, nodes=5, neighbours=5), 10.0) == pytest.approx(10 / 1.1)
    assert model.epochs(job("robust"), at(FULL, neighbours=5), 10.0) == 10.0


def factors(model: Stragglers | NoisySpeeds, jobs: range, workers: int = FULL) -> list[float]:
    return [model.epochs(job(name=f"j{index}"), at(workers), 1.0) for index in jobs]


def test_one_slow_worker_slows_its_synchronous_job() -> None:
    """And only its job; whoever adds workers meets more of them."""
    model = Stragglers(PLAIN, 7, probability=0.02, slowdown_max=3.0)
    drawn = factors(model, range(400))
    slow = sum(factor < 1 for factor in drawn) / 400
    assert 0.2 < slow < 0.36  # 1 - 0.98 ** 16 is 0.28.
    assert min(drawn) >= 1 / 3
    assert model.epochs(job(), at(0), 1.0) == 0
    sure = Stragglers(PLAIN, 7, probability=1.0, slowdown_max=3.0)
    slowdowns = [workers / FULL / sure.epochs(job(), at(workers), 1.0) for workers in range(1, FULL + 1)]
    assert slowdowns == pytest.approx(sorted(slowdowns))


def test_chance_depends_on_the_seed_and_the_job_and_on_nothing_else() -> None:
    """Asking twice, in another order or after others must not change a run."""
    for make in (lambda seed: Stragglers(PLAIN, seed, 0.5, 3.0), lambda seed: NoisySpeeds(PLAIN, seed, 0.3)):
        forwards, backwards = factors(make(1), range(20)), factors(make(1), range(19, -1, -1))
        assert forwards == backwards[::-1]
        assert forwards != factors(make(2), range(20))


def test_noise_stays_within_its_bounds_and_two_names_draw_apart() -> None:
    """Estimates that err exactly like the truth would look perfect."""
    truth, estimate = NoisySpeeds(PLAIN, 1, 0.2), NoisySpeeds(PLAIN, 1, 0.2, "estimate")
    drawn = factors(truth, range(200))
    assert min(drawn) < 0.85
    assert max(drawn) > 1.15
    assert all(0.8 <= factor <= 1.2 for factor in drawn)
    assert factors(estimate, range(200)) != drawn
    assert truth.epochs(job(), at(8), 1.0) != truth.epochs(job(), at(8, ps=2), 1.0)


def test_modifiers_work_on_top_of_each_other() -> None:
    """A cluster has all of them at once."""
    both = Interference(SpreadPenalty(PLAIN, 1.0), 1.0)
    assert both.epochs(job(), at(FULL, nodes=2, neighbours=2), 6.0) == pytest.approx(6 / 1.5 / 2)


def test_users_who_declare_wrong_lengths_do_not_change_the_truth() -> None:
    """The error is in what policies read; the job takes as long as it takes."""
    workload = Dl2Workload(Dl2WorkloadConfig(jobs=100))
    right, wrong = list(workload.draw(3)), list(Misdeclared(workload, 0.25).draw(3))
    assert [one.epochs for one in wrong] == [one.epochs for one in right]
    errors = [other.spec.epochs / one.spec.epochs - 1 for one, other in zip(right, wrong, strict=True)]
    assert -0.25 <= min(errors) < -0.15
    assert 0.15 < max(errors) <= 0.25
    assert list(Misdeclared(workload, 0.0).draw(3)) == right


def test_a_workload_of_millions_is_never_held_whole() -> None:
    """Wrong declarations must not make a lazy workload greedy."""

    class Endless:
        def draw(self, seed: int) -> Iterator[SimulatedJob]:
            while True:
                yield job()

    assert next(Misdeclared(Endless(), 0.1).draw(0)).epochs == 10.0


def view_of(simulated: SimulatedJob, *accelerators: str) -> JobView:
    spec = simulated.spec
    return JobView(
        spec.job_id,
        spec.job_type,
        spec.workers,
        spec.ps,
        spec.worker_demand,
        spec.ps_demand,
        spec.epochs,
        0.0,
        0.0,
        0,
        accelerators=accelerators,
    )


def test_an_oracle_tells_the_models_speeds_of_a_job_alone_on_its_nodes() -> None:
    """Only policies that are declared to know the truth get one."""
    seen: list[Setting] = []

    class Watched:
        def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
            seen.append(setting)
            return PLAIN.epochs(job, setting, elapsed_s)

    one = job()
    ask = oracle(Watched(), {one.spec.job_id: one})
    assert ask(view_of(one), 8, 2, 100.0) == 50.0
    assert ask(view_of(one, "V100"), 16, 2, 100.0) == 100.0
    assert seen == [at(8, 2), at(16, 2, on="V100")]
    assert oracle(PLAIN, lambda _: one)(view_of(one), 4, 1, 4.0) == 1.0


def test_hot_resizes_pause_for_a_blink_and_restarts_for_half_a_minute() -> None:
    """The gap that DL2 measures, and why elastic policies need hot scaling."""
    free, hot, restart = Costs("free"), Costs("hot"), Costs("restart")
    assert free.of("vgg-16") == VerbCosts(0, 0, 0)
    assert 0.01 < hot.of("resnet-50").scale_s < hot.of("vgg-16").scale_s < 0.1
    assert 20 < restart.of("dssm").scale_s < restart.of("vgg-16").scale_s < 60
    assert restart.of("unheard-of").scale_s < Costs("restart", {"unheard-of": 6.0}).of("unheard-of").scale_s < 250
    assert restart.of("dssm").scale_s == restart.of("dssm").stop_s + restart.of("dssm").start_s


def test_single_verbs_can_be_given_a_fixed_price() -> None:
    """Other simulators charge one number for everything; who compares charges the same."""
    config = CostsConfig.model_validate({"preset": "restart", "scale_s": 62.0, "stop_s": 0.0})
    costs = config.costs().of("vgg-16")
    assert (costs.scale_s, costs.stop_s) == (62.0, 0.0)
    assert costs.start_s == Costs("restart").of("vgg-16").start_s
