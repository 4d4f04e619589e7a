"""The back end `ray` where there is no Ray: what its thread and those that wait for it do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fedsched.core.ids import NodeName, TaskName
from fedsched.executor import ray as back_end
from fedsched.executor.launching import MachineTrouble
from fedsched.executor.ray import RayOptions, RayTasks
from fedsched.executor.records import Attempt, TaskOrder
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

NOWHERE = RayOptions("127.0.0.1:1")


def test_a_driver_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk at that moment ended the thread: from then on the agent never spoke to Ray again."""
    monkeypatch.setattr(back_end, "BACKOFF_S", (0.1, 0.5))
    place = tmp_path / "root"
    place.write_text("in the way, as a full disk is")
    tasks = RayTasks(NOWHERE, place / "ray.log")
    eventually(lambda: "no process that talks to Ray could be started" in caplog.text, "it could not be started")
    place.unlink()
    eventually((place / "ray.log").exists, "a driver is started as soon as it can be")
    tasks.close()


def test_who_waits_for_ray_is_told_at_once_when_the_executor_closes(tmp_path: Path) -> None:
    """It was told after a minute, and the agent's end waited for it."""
    attempt = Attempt(tmp_path / "jobs" / "job-1", 1)
    for folder in (attempt.tasks, attempt.logs):
        folder.mkdir(parents=True)
    order = TaskOrder(
        "request-1", TaskName("worker-0"), NodeName(""), 1, ("true",), str(tmp_path), (), False, str(attempt.path)
    )
    tasks = RayTasks(NOWHERE, tmp_path / "ray.log")
    told: list[MachineTrouble] = []

    def start() -> None:
        with pytest.raises(MachineTrouble, match="worker-0 could not be started") as trouble:
            tasks.start(1, order)
        told.append(trouble.value)

    starting = threading.Thread(target=start)
    starting.start()
    eventually(lambda: attempt.ordered(order.task).exists(), "the start is under way")
    closing = threading.Thread(target=tasks.close)
    closing.start()
    starting.join(back_end.REACH_S / 3)
    assert told, "it waits on"
    closing.join()
