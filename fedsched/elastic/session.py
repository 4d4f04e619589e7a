"""What a training script sees: batches to compute on, a step to take, and no sign of who else takes part."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, default_collate

from fedsched.elastic import environment, optimizers, printing
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.sampling import Sampling
from fedsched.elastic.worker import Turn, Worker
from fedsched.errors import InvalidInput

Collate = Callable[[list[Any]], Any]


class Trainer(Protocol):
    """Takes the steps of a session: this process alone, or together with a job's other tasks."""

    rank: int
    """This process' place among the workers; -1 before it is known."""
    wire_bytes: int
    """What it has sent to other machines and received from them so far, to exchange gradients and parameters."""

    def begin(self, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> int:
        """Say what is trained. Returns how many workers share a step already when a running job is joined, else 0."""

    def ready(self) -> None:
        """Be counted on from now on."""

    def turn(self) -> Turn | None:
        """The next step and this process' place in it; None after the last. May end the process."""

    def step(self, turn: Turn, weight: float, loss: float | torch.Tensor | None, *, overflow: bool = False) -> bool:
        """Take the step with the gradients that the model's parameters hold now; False when it was left out because
        the gradients of some worker had overflowed."""

    def report(self, accuracy: float) -> None:
        """Tell how good the model is."""

    def close(self, error: str) -> None:
        """Say good-bye."""


class Alone:
    """Ordinary training in one process: what a script does without a job around it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.rank = 0
        self.wire_bytes = 0
        self._optimizer = optimizer
        self._done = 0
        self._steps = 0

    def begin(self, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> int:
        """Count from the start."""
        self._steps = spec.steps
        return 0

    def ready(self) -> None:
        """Nobody to tell."""

    def turn(self) -> Turn | None:
        """Each step is wholly this process' own."""
        return Turn(self._done, rank=0, workers=1) if self._done < self._steps else None

    def step(self, turn: Turn, weight: float, loss: float | torch.Tensor | None, *, overflow: bool = False) -> bool:
        """The optimiser's own step."""
        if not overflow:
            self._optimizer.step()
        self._done += 1
        return not overflow

    def report(self, accuracy: float) -> None:
        """Nobody to tell."""

    def close(self, error: str) -> None:
        """Nobody to take leave of."""


class Session:
    """One training script's part in its job. Made by `elastic.join`."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        seed: int = 0,
        scheduler: LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._optimizer_name = optimizers.name_of(optimizer)
        self._state_keys = optimizers.state_keys(optimizer)
        self._seed = seed
        self._scheduler = scheduler
        self._scaler = scaler
        self._asynchronous = asynchronous
        self._scheduled = 0
        self._sampling: Sampling | None = None
        self._turn: Turn | None = None
        self._weight = 0.0
        self._stepped = True
        self._is_rehearsal = False
        self._trainer: Trainer
        if environment.in_a_job(os.environ):
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            printing.lose_what_cannot_be_logged()
            self._trainer = Worker(environment.read(os.environ), optimizer)
        else:
            self._trainer = Alone(optimizer)
        atexit.register(self._at_exit)

    @property
    def is_chief(self) -> bool:
        """Whether this process speaks for the job: evaluates, prints, writes files. Valid from the first batch on."""
        return self._trainer.rank == 0

    @property
    def steps(self) -> int:
        """Steps taken so far by the job, those before a restart included."""
        return self._turn.step + self._stepped if self._turn else 0

    @property
    def wire_bytes(self) -> int:
        """What this worker has sent to other machines and received from them so far."""
        return self._trainer.wire_bytes

    @property
    def epoch(self) -> int:
        """The epoch that the present batch belongs to, from 0."""
        return self._turn.step // self._sampling.steps_per_epoch if self._turn and self._sampling else 0

    def batches(
        self, dataset: Dataset[Any], *, batch_size: int, epochs: int, collate: Collate = default_collate
    ) -> Iterator[Any]:
        """This worker's slice of every step's batch, collated, to the end of the training.

        `batch_size` counts the samples of all workers together, in an asynchronous job those of one. A worker that is
        taken out of the job leaves the process here, with exit code 0. Each batch must be answered by `step`.

        Raises:
            InvalidInput: it was called before, or a batch was not answered.
        """
        if self._sampling is not None:
            raise InvalidInput(
                "batches() was called a second time; one call covers the whole training",
                "pass epochs=... and use session.epoch inside the loop",
            )
        self._sampling = Sampling(len(dataset), batch_size, epochs, self._seed)  # type: ignore[arg-type]
        spec, tensors = self._describe(self._sampling)
        workers = self._trainer.begin(spec, tensors)
        return self._turns(dataset, self._sampling, collate, workers)

    def _turns(self, dataset: Dataset[Any], sampling: Sampling, collate: Collate, workers: int) -> Iterator[Any]:
        if workers:
            yield from self._rehearse(
                dataset, sampling.part(0, 0, 1 if self._asynchronous else workers + 1)[0], collate
            )
        self._trainer.ready()
        while (turn := self._trainer.turn()) is not None:
            self._turn = turn
            self._catch_up(turn.step)
            # An asynchronous step is one worker's, with a batch of its own.
            place = (0, 1) if self._asynchronous else (turn.rank, turn.workers)
            indexes, self._weight = sampling.part(turn.step, *place)
            self._stepped = False
            if indexes:
                yield collate([dataset[index] for index in indexes])
                if not self._stepped:
                    raise InvalidInput(
                        f"the batch of step {turn.step} was not answered by session.step(loss)",
                        "call session.step(loss) once for every batch",
                    )
            else:  # More workers than samples: take part with nothing.
                self._finish(None)

    def _rehearse(self, dataset: Dataset[Any], indexes: list[int], collate: Collate) -> Iterator[Any]:
        """A first batch that counts for nothing, before this worker joins a running job.

        The first pass through a model costs a multiple of every later one, for memory and kernels that are got ready;
        the others would all wait for it.
        """
        chance = torch.get_rng_state()
        self._stepped, self._is_rehearsal = False, True
        yield collate([dataset[index] for index in indexes])
        self._is_rehearsal = False
        self._optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(chance)

    def step(self, loss: torch.Tensor) -> None:
        """Take the step that the last batch was for; `loss` is the mean over that batch.

        Raises:
            InvalidInput: there is no batch to be answered.
        """
        if self._stepped:
            raise InvalidInput("step() was called without a batch", "call it once for every batch of batches()")
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        if self._is_rehearsal:
            self._stepped = True
            return
        self._finish(loss.detach())

    def _finish(self, loss: torch.Tensor | None) -> None:
        assert self._turn is not None
        if self._scaler is None:
            self._trainer.step(self._turn, self._weight, loss)
        else:
            self._step_scaled(self._scaler, loss)
        self._optimizer.zero_grad(set_to_none=True)
        self._stepped = True
        self._catch_up(self._turn.step + 1)

    def _step_scaled(self, scaler: torch.amp.GradScaler, loss: torch.Tensor | None) -> None:
        """With gradients that were scaled up for float16: scaled back, and left out by all where one overflows."""
        assert self._turn is not None
        overflow = False
        if loss is not None:
            scaler.unscale_(self._optimizer)
            found = scaler._found_inf_per_device(self._optimizer).values()
            overflow = any(bool(item.item()) for item in found)
        self._trainer.step(self._turn, self._weight, loss, overflow=overflow)
        if loss is not None:
            scaler.update()

    def report(self, *, accuracy: float) -> None:
        """Tell the job's owner how good the model is; the chief's to do."""
        self._trainer.report(float(accuracy))

    def _catch_up(self, steps: int) -> None:
        """Bring the schedule to where the job is: a newcomer has missed steps, and everybody else exactly one."""
        with warnings.catch_warnings():
            # Torch wonders where the optimiser's steps are: on the servers.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            while self._scheduler is not None and self._scheduled < steps:
                self._scheduler.step()
                self._scheduled += 1

    def _describe(self, sampling: Sampling) -> tuple[ModelSpec, list[torch.Tensor]]:
        blocks, tensors = optimizers.blocks_of(self._model, self._optimizer)
        spec = ModelSpec(
            optimizer=self._optimizer_name,
            hyperparameters=optimizers.hyperparameters(self._optimizer),
            state_keys=self._state_keys,
            asynchronous=self._asynchronous,
            blocks=blocks,
            samples=sampling.samples,
            batch_size=sampling.batch_size,
            steps_per_epoch=sampling.steps_per_epoch,
            steps=sampling.steps,
            seed=sampling.seed,
        )
        return spec, tensors

    def _at_exit(self) -> None:
        """Leave with a word: the coordinator then knows an end from a crash."""
        problem = getattr(sys, "last_value", None)
        self._trainer.close(f"{type(problem).__name__}: {problem}" if problem is not None else "")
