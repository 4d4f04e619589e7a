"""Teaches the `set` policy to size and rank jobs as another policy does, on slots that the student itself gets into.

Data set aggregation (DAgger, Ross et al. 2011): the student decides, the teacher says what it would have done. Sizes
are learnt from the jobs that the teacher serves; urgency is the chance that the teacher serves a job at all, so who
would have waited there waits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedsched.core.ids import JobId
from fedsched.core.job import NO_TASKS, Allocation
from fedsched.learn.clipped import Improver, Lived, SlotBatch, answers, batch_of
from fedsched.learn.tensors import one_thread
from fedsched.policy.learnable import Array
from fedsched.policy.set import Choice, SlotSample, nearest


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A slot as the student saw it and what the teacher would have given its jobs."""

    lived: Lived
    """Its choice is the teacher's."""
    served: Array
    """(m,): 1 for jobs that the teacher gives something."""


def demonstration(sample: SlotSample, taught: Mapping[JobId, Allocation]) -> Demonstration:
    """What a teacher's allocations say about a slot; jobs that it gives nothing are in none of them."""
    workers = np.array([taught.get(job_id, NO_TASKS).workers for job_id in sample.jobs])
    ps = np.array([taught.get(job_id, NO_TASKS).ps for job_id in sample.jobs])
    zeros = np.zeros(len(sample.jobs))
    choice = Choice(nearest(ps), nearest(workers), zeros, zeros.astype(np.float32))
    return Demonstration(
        Lived(replace(sample, choice=choice), zeros.astype(np.float32)), (workers > 0).astype(np.float32)
    )


def imitate(
    improver: Improver, lessons: Sequence[Demonstration], *, passes: int, parts_slots: int = 64, settle: bool = False
) -> float:
    """Go through the lessons so many times; the mean loss of the last pass.

    Args:
        settle: let the learning rate fall to nothing on the way. Else every step still moves the weights as far as the
            first, and it is chance on which of many nearly equal sizes the likeliest falls.
    """
    losses: list[float] = []
    rate = improver.learning_rate
    with one_thread():
        whole = batch_of([one.lived for one in lessons])
        served = torch.from_numpy(np.concatenate([one.served for one in lessons]))
        for number in range(passes):
            losses = []
            parts = torch.split(improver.shuffled(whole.slots), parts_slots)
            for index, part in enumerate(parts):
                if settle:
                    improver.learning_rate = rate * (1 - (number + index / len(parts)) / passes)
                batch, rows = whole.part(part.sort().values)
                loss = imitation_loss(improver.weights, batch, served[rows])
                improver.step(loss)
                losses.append(float(loss.detach()))
    improver.learning_rate = rate
    return sum(losses) / len(losses)


def imitation_loss(weights: Mapping[str, torch.Tensor], batch: SlotBatch, served: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the teacher's sizes, for jobs that it serves, and of whether it serves them."""
    said = answers(weights, batch)
    sized = batch.free & (served > 0) & _on_offer(batch)
    rows = sized.nonzero()[:, 0]
    sizes = said.of_ps[rows, batch.ps[rows]] + said.of_workers[rows, batch.workers[rows]]
    waits = torch.nn.functional.binary_cross_entropy_with_logits(said.urgency[batch.free], served[batch.free])
    return waits - sizes.sum() / max(1, len(rows))


def _on_offer(batch: SlotBatch) -> torch.Tensor:
    """Whether the teacher's sizes are among the student's."""
    rows = torch.arange(len(batch.ps))
    return batch.ps_legal[rows, batch.ps] & batch.workers_legal[rows, batch.workers]
