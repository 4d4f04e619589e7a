"""What an attempt's job says of itself: in which phase it is, how far it has come, whether it stands still."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
from google.protobuf import json_format

from fedsched.core.job import Progress
from fedsched.pb.training_pb2 import JobReport

PROGRESS_EVERY_S = 0.5
"""Least time between two reports of progress."""
IDLE_S = 20.0
"""A job in which no step has ended for so long says so, and again each time that has doubled."""

_log = logging.getLogger(__name__)


class Heard:
    """The reports of one attempt's coordinator, and what follows from them.

    Args:
        result: the file that the coordinator writes when it ends.
        is_new: the attempt has just begun; what an earlier executor left may have trained already.
    """

    def __init__(self, name: str, result: Path, *, is_new: bool) -> None:
        self.report: JobReport | None = None
        """The newest one."""
        self.remark = ""
        """What is strange about them."""
        self._name = name
        self._result = result
        self._first_steps: int | None = None if is_new else -1
        self._stepped_at_s = float("inf")
        self._idle_told_s = 0.0
        self._posted = Progress()
        self._posted_at_s = float("-inf")

    def take(self, report: JobReport) -> None:
        """A new report."""
        if self._first_steps is None:
            self._first_steps = report.steps
        before = self.report
        if before is None or report.steps != before.steps or report.phase != before.phase:
            self._stepped_at_s, self._idle_told_s = time.monotonic(), 0.0
        if before is not None and report.steps < before.steps and not self.remark:
            self.remark = f"the job reported step {report.steps} after step {before.steps}"
            _log.warning("%s: %s", self._name, self.remark)
        self.report = report

    def says(self, *phases: JobReport.Phase.ValueType) -> bool:
        """Whether the job is in one of these phases."""
        return self.report is not None and self.report.phase in phases

    @property
    def is_ending(self) -> bool:
        """Whether the job ends by itself."""
        return self.says(JobReport.FINISHED, JobReport.STOPPED, JobReport.FAILED)

    @property
    def has_result(self) -> bool:
        """Whether the coordinator wrote down how the job ended."""
        return self._result.exists()

    def result(self) -> JobReport | None:
        """What the coordinator wrote down before it ended."""
        try:
            return json_format.Parse(self._result.read_text(), JobReport(), ignore_unknown_fields=True)
        except (OSError, ValueError, json_format.ParseError):
            return None

    def last(self) -> JobReport | None:
        """That, or else the newest report."""
        return self.result() or self.report

    def has_stepped(self) -> bool:
        """Whether the attempt has trained at all; one that has not could not be started."""
        final = self.last()
        return final is not None and self._first_steps is not None and final.steps > self._first_steps

    def news(self) -> Progress | None:
        """Progress that is to be told now."""
        if self.report is None or time.monotonic() - self._posted_at_s < PROGRESS_EVERY_S:
            return None
        progress = _furthest(self._posted, _progress(self.report, self._idle_s()))
        if progress == self._posted:
            return None
        self._posted, self._posted_at_s = progress, time.monotonic()
        return progress

    def reached(self) -> Progress | None:
        """How far the job has come; None where it never said."""
        final = self.last()
        return _furthest(self._posted, _progress(final)) if final is not None else None

    def _idle_s(self) -> float:
        """How long no step has ended, told in doubling lengths."""
        idle_s = time.monotonic() - self._stepped_at_s
        if self.says(JobReport.TRAINING) and idle_s >= max(IDLE_S, 2 * self._idle_told_s):
            self._idle_told_s = round(idle_s, 1)
        return self._idle_told_s


def _furthest(before: Progress, now: Progress) -> Progress:
    """What counts when a job reports less than it has before: training done is not undone."""
    if now.steps >= before.steps and now.epochs >= before.epochs:
        return now
    return msgspec.structs.replace(
        before, loss=now.loss, samples_per_s=now.samples_per_s, idle_s=now.idle_s, complaint=now.complaint
    )


def _progress(report: JobReport, idle_s: float = 0.0) -> Progress:
    return Progress(
        epochs=report.epochs,
        steps=report.steps,
        samples_per_s=report.samples_per_s,
        loss=report.loss if report.HasField("loss") else None,
        accuracy=report.accuracy if report.HasField("accuracy") else None,
        checkpoint_step=report.checkpoint_step,
        idle_s=idle_s,
        complaint=report.message if report.phase == JobReport.TRAINING else "",
    )
