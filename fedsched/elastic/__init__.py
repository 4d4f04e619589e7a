"""The runtime inside a job: three calls make a PyTorch training script elastic.

    session = elastic.join(model, optimizer, seed=0)
    for inputs, labels in session.batches(dataset, batch_size=64, epochs=10):
        session.step(loss_of(model(inputs), labels))

`batch_size` is the global one: each worker gets its slice of every step's batch, and the loss must be the mean over
that slice. Run by hand, without an executor around it, the same script is ordinary training in one process, with
the same sampling and the same arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from fedsched.elastic.session import Session

__all__ = ["join"]


def join(
    model: Module,
    optimizer: Optimizer,
    *,
    seed: int = 0,
    scheduler: LRScheduler | None = None,
    scaler: GradScaler | None = None,
    asynchronous: bool = False,
) -> Session:
    """Make this process a worker of its job, or, outside of one, the only worker.

    Args:
        model: what is trained. Its values count only in the job's first worker and without a checkpoint; everybody
            else gets them from there. Buffers (BatchNorm's statistics, say) follow each worker's own slices, and the
            first worker's are the ones that are saved.
        optimizer: any optimiser whose state belongs to single parameters. Its step runs on the parameter servers.
        seed: decides the order of samples.
        scheduler: stepped by the session after every step, and brought up to date where a worker joins late or a job
            is resumed. A scheduler that the script steps by itself would start anew there.
        scaler: scales losses up for float16; a step in which any worker's gradients overflow is left out by all.
            Autocast alone, with bfloat16, needs none.
        asynchronous: workers do not wait for each other. Each takes whole batches in turn, of a size that no resize
            changes; the servers apply every gradient at once, to parameters that others may have changed since.

    Raises:
        InvalidInput: the optimiser cannot work on several servers.
        StartFailed: the coordinator does not answer.
    """
    # Torch takes seconds to import, and the coordinator, which lives in this package too, does without.
    from fedsched.elastic.session import Session

    return Session(model, optimizer, seed=seed, scheduler=scheduler, scaler=scaler, asynchronous=asynchronous)
