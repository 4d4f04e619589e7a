"""Measures what resizing costs a running job, beside stopping it with a checkpoint and starting it again."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsched.bench.job import BenchJob, Load, bench_job

CHANGES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "+1 ps": ((1, 1), (1, 2)),
    "-1 ps": ((1, 2), (1, 1)),
    "+1 worker": ((1, 1), (2, 1)),
    "-1 worker": ((2, 1), (1, 1)),
}
"""Workers and servers before and after."""
BEFORE = 6
"""Steps without a resize before each one: what it is compared with."""
RESTARTS_MAX = 3
"""Restarts that are measured; each takes seconds, and they differ little."""
STEPS = 1_000_000
"""More than any run takes: it is the benchmark that ends the job."""


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """What one kind of change costs."""

    change: str
    resizes: int
    pause_ms_p50: float
    """How long workers stood still for the switch."""
    pause_ms_p99: float
    step_ms_p50: float
    """Length of an ordinary step."""
    longest_step_before_ms_p50: float
    """Longest of the ordinary steps just before an order (median): steps differ without a resize, too."""
    longest_step_ms_p50: float
    """Longest step between an order and its completion (median): the pause and all else that a resize does, a
    newcomer's start on the same cores included."""
    checkpoint_restart_ms: float
    """How long workers stand still when the same change is made by a checkpoint and a restart (median)."""
    ratio: float
    """The restart's standstill over the median pause."""
    throughput_kept: float
    """Steps per second from the order to its completion, over those just before (median)."""


@dataclass(frozen=True, slots=True)
class ScalingBench:
    """Of one run."""

    model_mb: float
    cases: tuple[ResizeCost, ...]


@dataclass(frozen=True, slots=True)
class _Resize:
    pause_s: float
    ordered_s: float
    complete_s: float
    attempt: int


def measure(repeats: int, load: Load, tell: Callable[[str], None], *, streamed: bool = False) -> ScalingBench:
    """Grow and shrink a job `repeats` times in each way, then restart it in between.

    Args:
        streamed: as if every task were on a machine of its own: tensors go through gRPC.
    """
    seen: dict[str, list[_Resize]] = {change: [] for change in CHANGES}
    with bench_job(load, STEPS, streamed=streamed) as job:
        job.start(1, 1)
        job.wait_for_steps(BEFORE)
        for number in range(repeats):
            tell(f"round {number + 1} of {repeats}")
            for change, (_, after) in CHANGES.items():
                seen[change].append(_resize(job, after))
                job.wait_for_steps(BEFORE)
        first = job.ends_of_steps(1)
        restart_s = [_restart(job) for _ in range(min(RESTARTS_MAX, repeats))]
    cases = tuple(_case(change, resizes, _chief(first), restart_s) for change, resizes in seen.items())
    return ScalingBench(_model_mb(), cases)


def _resize(job: BenchJob, after: tuple[int, int]) -> _Resize:
    ordered_s = time.monotonic()
    pause_s = job.scale(*after).pause_s
    return _Resize(pause_s, ordered_s, time.monotonic(), job.attempt)


def _restart(job: BenchJob) -> float:
    """From the last step before a checkpoint to the first one after it."""
    attempt = job.attempt
    job.stop()
    last_s = max(steps[-1][1] for steps in job.ends_of_steps(attempt).values())
    job.start(1, 1)
    job.wait_for_steps(1)
    first_s = min(steps[0][1] for steps in job.ends_of_steps(job.attempt).values())
    job.wait_for_steps(BEFORE)
    return first_s - last_s


def _chief(ends: dict[str, list[tuple[int, float]]]) -> list[float]:
    return [time_s for _, time_s in ends["worker-0"]]


def _case(change: str, resizes: Sequence[_Resize], ends: Sequence[float], restart_s: Sequence[float]) -> ResizeCost:
    steps_ms = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    pauses = [1e3 * resize.pause_s for resize in resizes]
    restart_ms = 1e3 * statistics.median(restart_s)
    return ResizeCost(
        change=change,
        resizes=len(resizes),
        pause_ms_p50=statistics.median(pauses),
        pause_ms_p99=percentile(pauses, 0.99),
        step_ms_p50=statistics.median(steps_ms),
        longest_step_before_ms_p50=1e3 * statistics.median(_longest(_before(resize, ends)) for resize in resizes),
        longest_step_ms_p50=1e3 * statistics.median(_longest(_during(resize, ends)) for resize in resizes),
        checkpoint_restart_ms=restart_ms,
        ratio=restart_ms / max(statistics.median(pauses), 1e-3),
        throughput_kept=statistics.median(_kept(resize, ends) for resize in resizes),
    )


def _during(resize: _Resize, ends: Sequence[float]) -> list[float]:
    """Ends of steps from the last one before the order to the first one after completion: all costs lie between."""
    before = [time_s for time_s in ends if time_s <= resize.ordered_s]
    later = ends[len(before) :]
    inside = [time_s for time_s in later if time_s <= resize.complete_s]
    return [before[-1], *inside, *later[len(inside) : len(inside) + 1]]


def _before(resize: _Resize, ends: Sequence[float]) -> list[float]:
    """Ends of the ordinary steps just before the order."""
    return [time_s for time_s in ends if time_s <= resize.ordered_s][-BEFORE:]


def _longest(ends: Sequence[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(ends))


def _kept(resize: _Resize, ends: Sequence[float]) -> float:
    before, during = _before(resize, ends), _during(resize, ends)
    pace_before = (len(before) - 1) / (before[-1] - before[0])
    return (len(during) - 1) / (during[-1] - during[0]) / pace_before


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of the values lie, the highest of a small sample."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _model_mb() -> float:
    from fedsched.bench.worker import model_and_optimizer

    model, _ = model_and_optimizer()
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
