"""The coordinator of the stand-in: a small elastic job for tests of the executor, which trains nothing.

Arguments: the steps of the training; the step at which it turns back to the first; for how long it does nothing about a
resize, and for how long it then switches, in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from fedsched.pb import training_pb2, training_pb2_grpc
from fedsched.pb.training_pb2 import JobReport


class Coordinator(training_pb2_grpc.JobControlServicer):
    """Members announce themselves by a file `members/<task>`; they leave when there is a file `unwanted/<task>`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.changed = threading.Condition()
        self.report = JobReport(phase=JobReport.JOINING, checkpoint_step=-1)
        self.wanted = os.environ["FEDSCHED_TASKS"].split(",")
        self.report.tasks.extend(self.wanted)
        self.answers: dict[int, futures.Future[training_pb2.ScaleReply]] = {}
        self.lost: set[int] = set()
        """Orders whose newcomers have ended."""
        self.over = threading.Event()
        self.turns_back_at = int(sys.argv[2])
        self.pause_s, self.switch_s = float(sys.argv[3]), float(sys.argv[4])
        (directory / "members").mkdir()
        (directory / "unwanted").mkdir()

    def joined(self, tasks: list[str]) -> bool:
        return all((self.directory / "members" / task).exists() for task in tasks)

    def Follow(self, request: training_pb2.FollowRequest, context: Any) -> Iterator[JobReport]:
        last = None
        while context.is_active():
            with self.changed:
                current = JobReport()
                current.CopyFrom(self.report)
                if current == last:
                    self.changed.wait(0.2)
                    continue
            last = current
            yield current
            if current.phase in (JobReport.FINISHED, JobReport.STOPPED, JobReport.FAILED):
                return

    def Scale(self, request: training_pb2.ScaleRequest, context: Any) -> training_pb2.ScaleReply:
        with self.changed:
            answer, is_new = self.answers.get(request.seq, futures.Future()), request.seq not in self.answers
            self.answers[request.seq] = answer
        if is_new:
            answer.set_result(self.carry_out(request))
        return answer.result()

    def carry_out(self, request: training_pb2.ScaleRequest) -> training_pb2.ScaleReply:
        until = time.monotonic() + request.deadline_s
        wanted = list(request.tasks)
        for task in wanted:
            (self.directory / "unwanted" / task).unlink(missing_ok=True)
        time.sleep(self.pause_s)
        while not self.joined(wanted):
            late = time.monotonic() > until and not self.switch_s
            if late or self.over.is_set() or request.seq in self.lost:
                with self.changed:
                    members = list(self.report.tasks)
                return training_pb2.ScaleReply(ok=False, tasks=members, message="not all joined in time")
            time.sleep(0.02)
        time.sleep(self.switch_s)
        with self.changed:
            for task in self.report.tasks:
                if task not in wanted:
                    (self.directory / "unwanted" / task).touch()
            del self.report.tasks[:]
            self.report.tasks.extend(wanted)
            self.changed.notify_all()
        return training_pb2.ScaleReply(ok=True, tasks=wanted, pause_s=0.01)

    def Lose(self, request: training_pb2.LostTask, context: Any) -> training_pb2.LostTaskNoted:
        self.lost.add(request.seq)
        return training_pb2.LostTaskNoted()

    def Stop(self, request: training_pb2.StopRequest, context: Any) -> training_pb2.StopReply:
        with self.changed:
            if request.checkpoint:
                self.report.checkpoint_step = self.report.steps
            step = self.report.checkpoint_step
        self.end(JobReport.STOPPED)
        return training_pb2.StopReply(checkpoint_step=step)

    def end(self, phase: JobReport.Phase.ValueType) -> None:
        with self.changed:
            self.report.phase = phase
            self.changed.notify_all()
        for task in self.report.tasks:
            (self.directory / "unwanted" / task).touch()
        self.over.set()

    def train(self, steps: int) -> None:
        while not self.joined(self.wanted):
            if self.over.wait(0.02):
                return
        while not self.over.is_set():
            with self.changed:
                self.report.phase = JobReport.TRAINING
                self.report.steps += 1
                if self.report.steps == self.turns_back_at:
                    self.report.steps, self.turns_back_at = 1, 0
                self.report.epochs = self.report.steps / 10
                self.report.loss = 1 / self.report.steps
                self.changed.notify_all()
            if self.report.steps >= steps:
                self.report.checkpoint_step = self.report.steps
                self.end(JobReport.FINISHED)
            self.over.wait(0.05)


def main(steps: int) -> None:
    directory = Path(os.environ["FEDSCHED_ATTEMPT_DIR"])
    coordinator = Coordinator(directory)
    server = grpc.server(futures.ThreadPoolExecutor(8))
    training_pb2_grpc.add_JobControlServicer_to_server(coordinator, server)
    host = os.environ.get("FEDSCHED_HOST", "127.0.0.1")
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    beside = directory / ".coordinator"
    beside.write_text(json.dumps({"address": f"{host}:{port}", "pid": os.getpid()}))
    beside.rename(directory / "coordinator.json")
    coordinator.train(steps)
    while any((directory / "members").iterdir()):
        time.sleep(0.02)
    report = coordinator.report
    result = {"phase": JobReport.Phase.Name(report.phase), "epochs": report.epochs, "steps": report.steps}
    result |= {"checkpoint_step": report.checkpoint_step}
    (directory / "result.json").write_text(json.dumps(result))
    server.stop(0.2).wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
