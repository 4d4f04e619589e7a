"""Judges of simulated rounds: they see the link and the records, and compute again what a round may have made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsched.core.commands import Command
from fedsched.core.events import Event, JobAssigned
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import RoundOutcome, RoundRecord
from fedsched.core.versions import Promotion, State
from fedsched.federation.averaging import Update, norm
from fedsched.federation.exchange import GradientReply
from fedsched.federation.loop import BaseVersion, Combining, Standing, gradients
from fedsched.federation.source import Hello
from fedsched.policy.installing import FROM_FILE
from fedsched.policy.speed_pool import STATISTICS, Pool, part_of
from fedsched.sim.federation import Judge
from fedsched.sim.federation_config import FederationSectionConfig
from fedsched.sim.federation_link import Answer, Message, Way
from fedsched.sim.judges import BrokenPromise

METRICS = frozenset({"loss", "entropy", "mean_reward"})
"""All that a learner may say of its batch."""
TOLERANCE_S = 1e-6


class FederationJudge(Judge):
    """Watches one federation.

    Promised are: only reports and gradients leave a cluster, and no text in them names a job; versions and rounds only
    grow; what a round makes follows from the updates that it counts and from nothing else, so a rejected one never
    changes the policy; no round waits longer than its deadline, and none is left open.
    """

    def __init__(self, standing: Standing, config: FederationSectionConfig, combining: Combining | None = None) -> None:
        self._config = config
        self._combining = combining or gradients(config)
        self._version_last = standing.version_last
        self._number_last = standing.number_last
        self._in_force = standing.active.record.digest
        self._answers: dict[tuple[int, ClusterName], GradientReply] = {}
        self._run: dict[tuple[ClusterName, int], int] = {}
        """Version that each agent, by term, was last seen to run."""
        self._texts: set[str] = set()
        self._classes: set[str] = set()
        """Of jobs, as they were named in statistics."""
        self._jobs: set[str] = set()
        self._types: set[str] = set()
        """Classes, which a job may be named after."""

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """One step of a cluster's loop: jobs get known."""
        if isinstance(event, JobAssigned):
            self._jobs.update((event.spec.job_id, event.spec.name))
            self._types.add(event.spec.job_type)

    def crossed(self, way: Way, cluster: ClusterName, message: Message, time_s: float) -> None:
        """A message arrived.

        Raises:
            BrokenPromise: it is of a kind that may not leave a cluster, or holds what may not.
        """
        if way is Way.DOWN:
            return
        if isinstance(message, Hello):
            self._texts.update((message.cluster, message.agent_version, message.policy))
        elif isinstance(message, Answer):
            reply = message.reply
            told = {name for name, _ in reply.metrics}
            if told - METRICS:
                raise BrokenPromise(f"cluster {cluster} told {sorted(told - METRICS)} at {time_s} s")
            self._texts.update((reply.declined, reply.traceparent, *reply.gradients))
            if STATISTICS in reply.gradients:
                self._classes.update(_classes_in(reply))
            self._answers.setdefault((message.number, cluster), reply)
        else:
            raise BrokenPromise(f"a {type(message).__name__} left cluster {cluster} at {time_s} s")

    def saved(self, record: RoundRecord, before: BaseVersion, after: BaseVersion | None) -> None:
        """A round is over.

        Raises:
            BrokenPromise: its record or what it made is not as promised.
        """
        self._recorded(record, before)
        if (record.outcome is RoundOutcome.COMBINED) != (after is not None):
            raise BrokenPromise(f"round {record.number} is {record.outcome.value} and made {after and after.record}")
        if after is None:
            if record.version != before.record.version:
                raise BrokenPromise(f"round {record.number} made nothing and left version {record.version} in force")
            return
        if after.record.version <= self._version_last or record.version != after.record.version:
            raise BrokenPromise(f"version {after.record.version} comes after {self._version_last}")
        # Against the order in which the loop combines them.
        counted = self._counted(record, before)[::-1]
        expected, _ = self._combining.step(before, counted, {})
        if expected.digest != after.checkpoint.digest:
            raise BrokenPromise(f"version {after.record.version} does not follow from the updates that counted in it")
        if isinstance(before.checkpoint, Pool) and isinstance(after.checkpoint, Pool):
            self._only_grew(before.checkpoint, after.checkpoint)
        self._version_last = after.record.version
        self._in_force = after.checkpoint.digest

    def _only_grew(self, before: Pool, after: Pool) -> None:
        for (cluster, epoch), part in before.parts.items():
            now = after.parts.get((cluster, epoch))
            if now is not None and now.age < part.age:
                raise BrokenPromise(f"what cluster {cluster} has seen in epoch {epoch} became older")

    def _recorded(self, record: RoundRecord, before: BaseVersion) -> None:
        if record.number <= self._number_last:
            raise BrokenPromise(f"round {record.number} comes after round {self._number_last}")
        self._number_last = record.number
        if before.checkpoint.digest != self._in_force:
            raise BrokenPromise(f"the policy changed before round {record.number}, outside any round")
        lasted_s = record.finished_s - record.started_s
        if not 0 <= lasted_s <= self._config.deadline_s + TOLERANCE_S:
            raise BrokenPromise(f"round {record.number} lasted {lasted_s} s; its deadline is {self._config.deadline_s}")
        told = sorted([*(part.cluster for part in record.contributions), *(gone.cluster for gone in record.absent)])
        if told != sorted(record.asked):
            raise BrokenPromise(f"round {record.number} asked {record.asked} and tells of {told}")

    def _counted(self, record: RoundRecord, before: BaseVersion) -> list[Update]:
        """The updates that counted, as they crossed the link; each must be one that may."""
        updates = []
        for part in record.contributions:
            reply = self._answers.get((record.number, part.cluster))
            fault = "it never crossed the link" if reply is None else self._fault(reply, record, before)
            if reply is None or fault:
                raise BrokenPromise(f"round {record.number} counts an update of {part.cluster}, and {fault}")
            updates.append(Update(part.cluster, reply.samples, reply.gradients))
        self._answers = {key: reply for key, reply in self._answers.items() if key[0] > record.number}
        return updates

    def _fault(self, reply: GradientReply, record: RoundRecord, before: BaseVersion) -> str:
        if isinstance(before.checkpoint, Pool):
            return self._combining.inspect(before.checkpoint, reply.gradients).misfit
        weights = before.checkpoint.arrays
        if reply.declined or reply.samples < 1:
            return "there is nothing in it"
        if {name: array.shape for name, array in reply.gradients.items()} != {
            name: array.shape for name, array in weights.items()
        }:
            return "it is of another shape than the policy"
        if not all(bool(np.isfinite(array).all()) for array in reply.gradients.values()):
            return "it is not finite"
        if norm(reply.gradients) > self._config.norm_max:
            return "it is too long"
        return "" if reply.base_version == record.base_version else "it is of another version"

    def took(self, cluster: ClusterName, term: int, version: int) -> None:
        """An agent was offered a version; from now on it runs this one.

        Raises:
            BrokenPromise: it goes back to an older one, or to one that was never made.
        """
        last = self._run.get((cluster, term), 0)
        if version < last or version > self._version_last:
            raise BrokenPromise(
                f"cluster {cluster} goes from version {last} to {version}; made are {self._version_last}"
            )
        self._run[cluster, term] = version

    def close(self, held: bool) -> None:
        """The world has come to its end.

        Raises:
            BrokenPromise: a round is open, or a job's name has left its cluster.
        """
        if held:
            raise BrokenPromise("the world ended and a round was still open")
        named = sorted(self._jobs & self._classes - self._types)
        if named:
            raise BrokenPromise(f"job {named[0]} is named in statistics that left its cluster")
        for text in sorted(self._texts):
            told = sorted(job for job in self._jobs if job in text)
            if told:
                raise BrokenPromise(f"job {told[0]} is named in what left its cluster: {text}")


def _classes_in(reply: GradientReply) -> set[str]:
    try:
        return {name for cell, _ in part_of(reply.gradients).statistics for name in (cell.job_type, cell.accelerator)}
    except ValueError:
        return set()  # It does not count, whatever it names.


def judge_versions(cluster: ClusterName, orders: Sequence[Promotion], decides: int) -> None:
    """At the end of a world: what decides is what was ordered last, and nothing is left undone.

    Args:
        orders: all that are kept, oldest first.
        decides: version of the policy that decides.

    Raises:
        BrokenPromise: it is not so.
    """
    undone = [order for order in orders if order.state is State.PENDING]
    active = [order for order in orders if order.state is State.ACTIVE]
    if undone:
        raise BrokenPromise(f"cluster {cluster} was to decide with {undone[0].version}, and nothing came of it")
    if not active or (active[-1].version.version or FROM_FILE) != decides:
        ordered = active[-1].version if active else "nothing"
        raise BrokenPromise(f"cluster {cluster} decides with version {decides}; ordered was {ordered}")
