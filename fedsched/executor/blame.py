"""Says to what an attempt's end is due: of tasks that end together one is the cause, and the others its victims."""

from __future__ import annotations

from fedsched.core.ids import TaskName
from fedsched.core.job import COORDINATOR, Reason
from fedsched.executor.endings import explain
from fedsched.executor.hearing import Heard
from fedsched.executor.records import ExitRecord
from fedsched.executor.roster import Roster
from fedsched.pb.training_pb2 import JobReport

JOB_ENDED = "the job ended: "
"""What a worker of the elastic runtime says when it ends because the job has failed."""


class Blame:
    """Judges by what the job has said of itself and by how its tasks ended."""

    def __init__(self, heard: Heard, tasks: Roster) -> None:
        self._heard = heard
        self._tasks = tasks

    def is_victim(self, task: TaskName, record: ExitRecord) -> bool:
        """Whether the task only ended because another one did: a job that fails takes all of its tasks along, and
        those often end before the one that is to blame."""
        if record.code is None:
            return False
        if self._heard.report is not None and self._heard.report.phase == JobReport.FAILED:
            return self._heard.report.message.partition(" ")[0].rstrip(":,") != task
        return (task == COORDINATOR and self._heard.has_result) or JOB_ENDED in self._tasks.log_tail(task)

    def explain(self, task: TaskName, record: ExitRecord) -> tuple[Reason, str]:
        """Why a task that should not have ended did, and a message for its user."""
        reason, message = explain(task, record, self._tasks.log_tail(task))
        never_trained = reason is Reason.USER_ERROR and not self._heard.has_stepped()
        return (Reason.START_FAILED if never_trained else reason), message

    def as_complained(self) -> tuple[Reason, str]:
        """What the job itself gave as the reason of its failure, where no task's end tells it."""
        final = self._heard.last()
        message = final.message if final is not None and final.phase == JobReport.FAILED else ""
        return self._failed(), message or "the job failed and did not say why"

    def verdict(self, given: tuple[Reason, str] | None) -> tuple[Reason, str]:
        """How the attempt ended, once none of its tasks runs any more.

        Args:
            given: what it was ended for, if it was.
        """
        result = self._heard.result()
        if (result is not None and result.phase == JobReport.FINISHED) or self._heard.says(JobReport.FINISHED):
            return Reason.FINISHED, self._complaints_after_the_end()
        if given is not None:
            return given
        if not self._tasks:
            return Reason.LOST, "no task of the attempt was found"
        final = result or self._heard.report
        if final is not None and final.phase == JobReport.FAILED:
            return self._failed(), final.message
        ends = sorted(
            (self.is_victim(task, seen.exit), seen.exit.ended_s, task, seen.exit)
            for task, seen in self._tasks.items()
            if seen.exit and seen.exit.code != 0
        )
        if ends:
            return self.explain(ends[0][2], ends[0][3])
        if final is not None and final.phase == JobReport.STOPPED:
            return Reason.LOST, "the job was stopped and nobody knows by whom"
        return self.explain(*next((task, seen.exit) for task, seen in sorted(self._tasks.items()) if seen.exit))

    def _failed(self) -> Reason:
        return Reason.USER_ERROR if self._heard.has_stepped() else Reason.START_FAILED

    def _complaints_after_the_end(self) -> str:
        """A script may still fail after the training is done; the result stands, its user should know."""
        exits = [(task, seen.exit) for task, seen in sorted(self._tasks.items()) if seen.exit and seen.exit.code]
        return "; ".join(
            f"after the training {explain(task, end, self._tasks.log_tail(task))[1]}" for task, end in exits
        )
