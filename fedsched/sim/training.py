"""Makes first weights for DL2: a teacher runs simulated clusters, DL2 learns its decisions, held-out runs judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.errors import InvalidInput
from fedsched.learn.supervised import Fit, Label, Watched, agreement, fingerprint
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, Dl2Shape, initial
from fedsched.policy.learnable import misfit
from fedsched.policy.registry import heuristic
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.training_state import Kept, taken_apart, under
from fedsched.sim.warm_up_grounds import Declared, Drawn, WarmUpGround

Tell = Callable[[str], None]
"""Hears what happens, for people who wait."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmUp:
    """Weights that decide like the teacher, and how well they do."""

    checkpoint: Checkpoint
    labels: int
    first_loss: float
    last_loss: float
    agreement: float
    """Share of the teacher's held-out choices that the network would have made."""
    teacher_jct_s: float
    """Average over the held-out runs."""
    student_jct_s: float
    rows: Sequence[Row]
    """The log."""


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    """What is learnt from whom. The same plan makes the same bytes."""

    teacher: str = "drf"
    seed: int = 0
    steps: int = 4000
    scenarios: int = 80
    """Simulated runs that the teacher is watched on."""
    held_out: int = 10
    """Others that judge the result."""
    name: str = ""
    """Of the experiment."""
    experiment: ExperimentConfig | None = None
    """Whose clusters and workload are simulated; None: small clusters are drawn."""

    @property
    def ground(self) -> WarmUpGround:
        """Where it is learnt."""
        if self.experiment is None:
            return Drawn(self.teacher, self.seed)
        return Declared(self.name, self.experiment, self.seed)

    @property
    def step_rows(self) -> int:
        """Steps between two rows of the log."""
        return max(1, self.steps // 40)

    def plain(self) -> dict[str, Any]:
        """All that decides what is made, as plain data."""
        plain: dict[str, Any] = {
            "teacher": self.teacher,
            "seed": self.seed,
            "steps": self.steps,
            "scenarios": self.scenarios,
            "held_out": self.held_out,
        }
        if self.experiment is not None:
            plain["experiment"] = self.experiment.model_dump(mode="json")
        return plain

    def step_of(self, begun: Kept | None) -> int:
        """How many steps are done."""
        return len(begun.arrays.get("losses", ())) if begun is not None else 0


Row = Mapping[str, int | float]
Keep = Callable[[Kept, Sequence[Row]], None]
"""Hears of all that the training goes on from, and of its log so far."""


def warm_up(
    plan: WarmUpPlan,
    command: str,
    *,
    begun: Kept | None = None,
    keep: Keep = lambda kept, rows: None,
    tell: Tell = lambda line: None,
) -> WarmUp:
    """Train and judge. The same plan gives the same checkpoint, byte for byte, also when it was interrupted.

    Args:
        plan: what is learnt.
        command: what a user types for this; it goes into the checkpoint.
        begun: where an interrupted training goes on from.
        keep: hears of every row of the log.
        tell: hears what happens.
    """
    shape, teacher, seed, ground = Dl2Shape(), plan.teacher, plan.seed, plan.ground
    tell(f"watching {teacher} on {ground.told(plan.scenarios, held_out=False)}")
    labels, _ = _watch(teacher, shape, ground, plan.scenarios, held_out=False)
    _refuse_nothing(labels, teacher)
    tell(f"learning {len(labels)} decisions in {plan.steps} steps")
    fit = _fit(plan, labels, shape, begun, keep)
    fitted = fit.fitted()
    tell(f"comparing on {ground.told(plan.held_out, held_out=True)}")
    held_out_labels, teacher_jct_s = _watch(teacher, shape, ground, plan.held_out, held_out=True)
    _refuse_nothing(held_out_labels, teacher)
    agreed = agreement(fitted.arrays, held_out_labels)
    student_jct_s = ground.jct_s(lambda: DL2(fitted.arrays, shape=shape, seed=seed), plan.held_out, held_out=True)
    made: dict[str, str | int | float] = {
        "command": command,
        "data": ground.told(plan.scenarios, held_out=False),
        "teacher": teacher,
        "seed": seed,
        "steps": plan.steps,
        "scenarios": plan.scenarios,
        "labels": len(labels),
        "labels_digest": fingerprint(labels),
        "first_loss": round(fitted.first_loss, 3),
        "last_loss": round(fitted.last_loss, 3),
        "agreement": round(agreed, 3),
        "held_out": ground.told(plan.held_out, held_out=True),
        "held_out_jct_s": round(student_jct_s, 2),
        "held_out_jct_s_teacher": round(teacher_jct_s, 2),
        "numpy": version("numpy"),
        "torch": version("torch").split("+")[0],
    }
    checkpoint = Checkpoint(fitted.arrays, shape, made)
    figures = len(labels), fitted.first_loss, fitted.last_loss, agreed, teacher_jct_s, student_jct_s
    return WarmUp(checkpoint, *figures, rows_of(plan, fit.losses))


def _fit(plan: WarmUpPlan, labels: Sequence[Label], shape: Dl2Shape, begun: Kept | None, keep: Keep) -> Fit:
    fit = Fit(initial(shape, plan.seed), labels, steps=plan.steps, learning_rate=3e-3, seed=plan.seed)
    if begun is not None:
        with taken_apart():
            _check(under(begun.arrays, "weights/"), shape)
            fit.restore(begun.arrays)
    while len(fit.losses) < plan.steps:
        fit.run(min(plan.steps, len(fit.losses) + plan.step_rows))
        keep(Kept(plan.plain(), fit.state(), {}), rows_of(plan, fit.losses))
    return fit


def _check(weights: Mapping[str, NDArray[Any]], shape: Dl2Shape) -> None:
    """Training computes more exactly than the policy."""
    problem = misfit({name: array.astype(np.float32) for name, array in weights.items()}, shape.layers())
    if problem:
        raise ValueError(problem)


def rows_of(plan: WarmUpPlan, losses: Sequence[float]) -> list[Row]:
    """The log: mean loss over the steps since the row before."""
    parts = [losses[start : start + plan.step_rows] for start in range(0, len(losses), plan.step_rows)]
    return [
        {"step": number * plan.step_rows + len(part), "loss": sum(part) / len(part)}
        for number, part in enumerate(parts)
    ]


def labels_digest(teacher: str, seed: int, scenarios: int) -> str:
    """Fingerprint of the teacher's decisions on all the training's clusters.

    It stands in the checkpoint, so a change of the scheduler, the simulator or the teacher that makes the shipped
    weights irreproducible is noticed without learning anything.
    """
    return fingerprint(_watch(teacher, Dl2Shape(), Drawn(teacher, seed), scenarios, held_out=False)[0])


def _watch(
    teacher: str, shape: Dl2Shape, ground: WarmUpGround, runs: int, *, held_out: bool
) -> tuple[list[Label], float]:
    """The teacher's decisions in these runs, and its average JCT."""
    watched: list[Watched] = []

    def make() -> Watched:
        watched.append(Watched(heuristic(teacher), shape))
        return watched[-1]

    jct_s = ground.jct_s(make, runs, held_out=held_out)
    return [label for one in watched for label in one.labels], jct_s


def _refuse_nothing(labels: Sequence[Label], teacher: str) -> None:
    """Jobs that never get more than their minimum teach nothing.

    Raises:
        InvalidInput: so it is.
    """
    if not labels:
        raise InvalidInput(
            f"{teacher} never gave a job more than its minimum; decisions to learn from were expected",
            "take jobs that can grow, larger clusters, or more --scenarios",
        )
