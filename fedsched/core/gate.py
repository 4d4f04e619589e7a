"""Decides whether something new may take the place of something old: only where it does no harm.

Both are valued on the same cases, say a cluster's own decisions, and compared case by case. It is a test of
non-inferiority: the new one is accepted as soon as the data rule out, with the rule's confidence, that it is worse by
more than a margin; it need not be better. Cases follow each other in time and resemble their neighbours, so they are
not counted as independent: means of consecutive batches are (the method of batch means, Law, "Simulation Modeling and
Analysis", chapter 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from math import isfinite, sqrt

from fedsched.core.record import Record

STUDENT_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Quantiles of Student's t with 1, 2, ... degrees of freedom: 95 %, one-sided."""
BATCHES = len(STUDENT_95) + 1
"""Consecutive batches of cases whose means count as independent; of fewer cases each is a batch."""


class GateRule(Record, frozen=True):
    """When something new is let through."""

    margin: float = 0.02
    """So much worse, relative to the old one's mean size, still counts as no harm."""
    cases_min: int = 20
    """Before so many cases nothing is decided."""
    cases_max: int = 320
    """What has not shown by then that it does no harm is refused."""
    failures_max: float = 0.05
    """Share of cases in which the new one may fail and the old one not."""
    by_estimate: bool = False
    """What is still open after `cases_max` is let through if it was not worse on average, in place of being refused:
    where the old one has no better right than the new one."""


class GateOutcome(StrEnum):
    """What a gate says."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDECIDED = "undecided"


class GateVerdict(Record, frozen=True):
    """What a gate says, and from what."""

    outcome: GateOutcome
    cases: int
    """Cases in which both could be valued."""
    failures: int
    """Cases in which the new one failed and the old one did not."""
    change: float
    """Mean difference, new less old, relative to the old one's mean size; above 0 is better."""
    error: float | None
    """To either side of `change`, with 95 % one-sided confidence; None where fewer than two cases can be compared."""
    why: str

    @property
    def accepted(self) -> bool:
        """Whether the new one may take the old one's place."""
        return self.outcome is GateOutcome.ACCEPTED


def accepts(old: Sequence[float], new: Sequence[float], rule: GateRule | None = None) -> GateVerdict:
    """Whether the new one does no harm.

    Asked after every case it would be wrong more often than its confidence says; `due` tells when to ask.

    Args:
        old: what the old one was worth in each case, in the order of time; more is better, so a duration counts
            negative. What is not finite stands for a failure.
        new: the same of the new one.
        rule: when it is let through.

    Raises:
        ValueError: there are not as many new values as old ones.
    """
    rule = rule or GateRule()
    pairs = list(zip(old, new, strict=True))
    failures = sum(isfinite(before) and not isfinite(after) for before, after in pairs)
    both = [(before, after) for before, after in pairs if isfinite(before) and isfinite(after)]
    change, error = _compare(both)
    outcome, why = _judge(len(pairs), len(both), failures, change, error, rule)
    return GateVerdict(outcome, len(both), failures, change, error, why)


def due(cases: int, rule: GateRule | None = None) -> bool:
    """Whether to ask after so many cases: at `cases_min`, at each doubling of it, and at `cases_max`."""
    rule = rule or GateRule()
    looks, remainder = divmod(cases, rule.cases_min)
    return cases == rule.cases_max or (remainder == 0 and looks > 0 and looks & (looks - 1) == 0)


def _judge(
    cases: int, compared: int, failures: int, change: float, error: float | None, rule: GateRule
) -> tuple[GateOutcome, str]:
    if cases < rule.cases_min:
        return GateOutcome.UNDECIDED, f"{cases} cases so far; {rule.cases_min} at least are compared"
    if failures > rule.failures_max * cases:
        return GateOutcome.REFUSED, f"it failed in {failures} of {cases} cases; {rule.failures_max:.0%} may fail"
    if error is None:
        return GateOutcome.UNDECIDED, f"only {compared} of {cases} cases can be compared"
    told = f"{change:+.1%} ± {error:.1%} over {compared} cases"
    if change - error >= -rule.margin:
        return GateOutcome.ACCEPTED, f"it does no harm: {told}; worse by {rule.margin:.1%} would be harm"
    if change + error < -rule.margin:
        return GateOutcome.REFUSED, f"it does harm: {told}; worse by {rule.margin:.1%} is harm"
    if cases >= rule.cases_max and rule.by_estimate and change >= 0:
        return GateOutcome.ACCEPTED, f"it is estimated to be no worse: {told}"
    if cases >= rule.cases_max:
        return GateOutcome.REFUSED, f"it did not show that it does no harm: {told}"
    return GateOutcome.UNDECIDED, f"{told}; that may still be {rule.margin:.1%} worse"


def _compare(pairs: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """Mean relative difference and its error; of a single case none is known."""
    scale = sum(abs(before) for before, _ in pairs) / len(pairs) if pairs else 0.0
    differences = [after - before for before, after in pairs]
    if not pairs:
        return 0.0, None
    if not any(differences):
        return 0.0, 0.0
    if scale == 0.0:
        # Where the old one was never worth anything, any gain is one and any loss is harm, whatever its size.
        scale = sum(map(abs, differences)) / len(differences)
    change = sum(differences) / len(differences) / scale
    batches = min(BATCHES, len(pairs))
    if batches < 2:
        return change, None
    cuts = [len(differences) * number // batches for number in range(batches + 1)]
    means = [sum(differences[a:b]) / (b - a) / scale for a, b in pairwise(cuts)]
    middle = sum(means) / batches
    variance = sum((mean - middle) ** 2 for mean in means) / (batches - 1)
    return change, STUDENT_95[batches - 2] * sqrt(variance / batches)
