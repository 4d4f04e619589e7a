"""Makes first weights for DL2: a teacher runs simulated clusters, DL2 learns its decisions, held-out clusters judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from fedsched.core.decision import Policy
from fedsched.learn.supervised import Label, Watched, agreement, fingerprint, fit
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, Shape, initial
from fedsched.policy.registry import heuristic
from fedsched.sim.workload import draw_scenario
from fedsched.sim.world import run_scenario

HELD_OUT_OFFSET = 50_000
"""Held-out scenarios are drawn from seeds this far from those of training."""
SEED_STRIDE = 100_000

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
    """Average over the held-out scenarios."""
    student_jct_s: float


def warm_up(
    *, teacher: str, seed: int, steps: int, scenarios: int, held_out: int, command: str, tell: Tell = lambda _: None
) -> WarmUp:
    """Train and judge. The same arguments give the same checkpoint, byte for byte.

    Args:
        scenarios: how many simulated clusters the teacher is watched on.
        held_out: how many others judge the result.
        command: what a user types for this; it goes into the checkpoint.
    """
    shape = Shape()
    tell(f"watching {teacher} on {scenarios} simulated clusters")
    labels, _ = _watch(teacher, shape, seed * SEED_STRIDE, scenarios)
    tell(f"learning {len(labels)} decisions in {steps} steps")
    fitted = fit(initial(shape, seed), labels, steps=steps, learning_rate=3e-3, seed=seed)
    tell(f"comparing on {held_out} other clusters")
    others = seed * SEED_STRIDE + HELD_OUT_OFFSET
    held_out_labels, teacher_jct_s = _watch(teacher, shape, others, held_out)
    agreed = agreement(fitted.arrays, held_out_labels)
    made: dict[str, str | int | float] = {
        "command": command,
        "teacher": teacher,
        "seed": seed,
        "steps": steps,
        "scenarios": scenarios,
        "labels": len(labels),
        "first_cluster": first_cluster(teacher, seed),
        "first_loss": round(fitted.first_loss, 3),
        "last_loss": round(fitted.last_loss, 3),
        "agreement": round(agreed, 3),
        "numpy": version("numpy"),
        "torch": version("torch").split("+")[0],
    }
    student = DL2(fitted.arrays, shape=shape, seed=seed)
    student_jct_s = _average_jct_s(student, heuristic(teacher), others, held_out)
    checkpoint = Checkpoint(fitted.arrays, shape, made)
    return WarmUp(checkpoint, len(labels), fitted.first_loss, fitted.last_loss, agreed, teacher_jct_s, student_jct_s)


def first_cluster(teacher: str, seed: int) -> str:
    """Fingerprint of the teacher's decisions on the first training cluster.

    It stands in the checkpoint, so a change of the scheduler, the simulator or the teacher that makes the shipped
    weights irreproducible is noticed in a second.
    """
    return fingerprint(_watch(teacher, Shape(), seed * SEED_STRIDE, 1)[0])


def _watch(teacher: str, shape: Shape, first_seed: int, scenarios: int) -> tuple[list[Label], float]:
    """The teacher's decisions on these scenarios, and its average JCT."""
    watched = Watched(heuristic(teacher), shape)
    jct_s = _average_jct_s(watched, heuristic(teacher), first_seed, scenarios)
    return watched.labels, jct_s


def _average_jct_s(policy: Policy, fallback: Policy, first_seed: int, scenarios: int) -> float:
    results = [run_scenario(draw_scenario(first_seed + index), policy, fallback) for index in range(scenarios)]
    return sum(result.average_jct_s for result in results) / len(results)
