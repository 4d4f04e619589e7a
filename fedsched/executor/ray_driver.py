"""The process that talks to Ray for the back end `ray`: orders come in on stdin, what Ray says goes out on stdout.

A process of its own, because Ray ends the one that it lives in when the cluster's head is lost, and an agent must not
end. Each task is a detached actor in a detached placement group of one bundle on the node that the scheduler chose, so
that both survive this process; another one finds them by their name.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, assert_never

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedsched.core.job import Reason
from fedsched.executor import ray_talk
from fedsched.executor.processes import start_tied
from fedsched.executor.ray_talk import TaskState

LOOK_S = 0.5
"""How often the actors are looked at."""
COUNT_S = 2.0
"""How often the nodes are."""
LEAVE_S = 2.0
"""How long an actor whose task has ended stays to tell so; then it gives its place back."""
KILLED_S = 2.0
"""How long after its shepherd was killed an actor waits to tell so: Ray, when it ends an actor, first kills what that
has started. Then the actor is gone before this time is over, and Ray says why."""
DYING_S = 15.0
"""How long after an actor's death its node may still turn out to be dead: Ray notices the one before the other."""


class Herder:
    """The actor: it starts the shepherd of one task as a process, passes signals on, and tells when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._code = 0

    def run(self, program: tuple[str, ...]) -> int:
        """Run the shepherd to its end; its exit code."""
        self._process = start_tied([sys.executable, *program], stdin=subprocess.DEVNULL)
        self._code = self._process.wait()
        if self._code < 0:
            time.sleep(KILLED_S)
        self._over.set()
        threading.Timer(LEAVE_S, self._leave).start()
        return self._code

    def wait(self) -> int:
        """The exit code, once there is one: for a driver that did not start the task."""
        self._over.wait()
        return self._code

    def tell(self, signum: int) -> None:
        """Pass a signal on to the shepherd."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def where(self) -> str:
        """The id of the node that the actor is on."""
        return str(ray.get_runtime_context().get_node_id())

    def _leave(self) -> None:
        group = ray.util.get_current_placement_group()
        if group is not None:
            remove_placement_group(group)
        os._exit(0)


class Driver:
    """All tasks of a cluster that somebody asks about, by name."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self._ends: dict[str, Any] = {}
        self._where: dict[str, Any] = {}
        self._placed: set[str] = set()
        self._dying: dict[str, tuple[float, str]] = {}
        self._said: dict[str, TaskState] = {}
        self._names: tuple[str, ...] = ()
        self._counted_s = float("-inf")

    def obey(self, order: ray_talk.Order) -> None:
        """Carry out an order; the answer to a start says whether Ray took it."""
        match order:
            case ray_talk.Start():
                _say(ray_talk.Started(order.name, self._start(order)))
            case ray_talk.Watch(name):
                self._watch(name)
            case ray_talk.Tell(names, signum):
                for name in names:
                    self._tell(name, signum)
            case ray_talk.Forget(name):
                self._forget(name)
            case _:
                assert_never(order)

    def look(self) -> None:
        """Say what has changed."""
        if time.monotonic() - self._counted_s >= COUNT_S:
            self._counted_s, names = time.monotonic(), tuple(sorted(_nodes()))
            if names != self._names:
                self._names = names
                _say(ray_talk.Nodes(names))
        for name in [*self._ends, *self._dying]:
            said = self._standing(name)
            if said != self._said.get(name):
                self._said[name] = said
                _say(ray_talk.Stands(name, said))

    def _start(self, order: ray_talk.Start) -> str:
        name = order.name
        where = [_selector(order.node)] if order.node else None
        if where == [None]:
            return f"Ray has no node {order.node}; it has {', '.join(sorted(_nodes())) or 'none'}"
        bundle: dict[str, float] = {"CPU": order.cpus, "memory": order.memory_bytes}
        if order.gpus:
            bundle["GPU"] = order.gpus
        group = placement_group(
            [bundle], name=name, lifetime="detached", **({"bundle_label_selector": where} if where else {})
        )
        actor = (
            ray.remote(Herder)
            .options(
                name=name,
                lifetime="detached",
                max_concurrency=4,
                num_cpus=order.cpus,
                num_gpus=order.gpus,
                memory=order.memory_bytes,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote()
        )
        self._groups[name], self._actors[name] = group, actor
        self._where[name] = actor.where.remote()  # type: ignore[attr-defined]  # made at run time
        self._ends[name] = actor.run.remote(order.program)  # type: ignore[attr-defined]  # made at run time
        return ""

    def _watch(self, name: str) -> None:
        if name in self._ends or name in self._dying:
            return
        try:
            self._actors[name] = ray.get_actor(name)
            self._where[name] = self._actors[name].where.remote()
            self._ends[name] = self._actors[name].wait.remote()
            with suppress(ValueError):
                self._groups[name] = get_placement_group(name)
        except ValueError:
            _say(ray_talk.Stands(name, TaskState(ended=True)))

    def _standing(self, name: str) -> TaskState:
        self._locate(name)
        if name in self._dying:
            return self._judge(name)
        done, _ = ray.wait([self._ends[name]], timeout=0)
        if not done:
            return TaskState(waiting=not self._has_place(name))
        end = self._ends.pop(name)
        actor = self._actors.pop(name, None)
        reason, message = Reason.NONE, ""
        try:
            ray.get(end)
        except OutOfMemoryError as problem:
            reason, message = Reason.OUT_OF_MEMORY, f"was ended by Ray for its memory: {_brief(problem)}"
        except RayActorError as problem:
            reason, message = _cause(str(problem))
            if reason is Reason.NONE:
                self._dying[name] = (time.monotonic(), message)
                return self._judge(name)
        except RayError as problem:
            message = _brief(problem)
        self._free(name, actor)
        return TaskState(ended=True, reason=reason, message=message)

    def _locate(self, name: str) -> None:
        """Note where an actor is as soon as it says so: once it is dead nobody does."""
        found = self._where.get(name)
        if found is not None and not isinstance(found, str) and ray.wait([found], timeout=0)[0]:
            try:
                self._where[name] = ray.get(found)
            except RayError:
                del self._where[name]

    def _judge(self, name: str) -> TaskState:
        """Whether an actor that died for no known cause went with its node."""
        since, message = self._dying[name]
        node = self._where.get(name)
        if isinstance(node, str) and node not in _nodes().values():
            reason, message = Reason.NODE_LOST, f"lost its node{_known_as(node)}"
        elif time.monotonic() - since > DYING_S:
            reason = Reason.NONE
        else:
            return TaskState()
        del self._dying[name]
        self._free(name, None)
        return TaskState(ended=True, reason=reason, message=message)

    def _has_place(self, name: str) -> bool:
        group = self._groups.get(name)
        if group is not None and name not in self._placed and placement_group_table(group).get("state") != "PENDING":
            self._placed.add(name)
        return group is None or name in self._placed

    def _tell(self, name: str, signum: int) -> None:
        actor = self._actors.get(name)
        if actor is None:
            return
        if self._has_place(name):
            actor.tell.remote(signum)
        if signum == signal.SIGKILL or not self._has_place(name):
            self._free(name, actor)

    def _forget(self, name: str) -> None:
        """An end is on record already: what is left of the task gives its place back, and nothing is told of it."""
        self._ends.pop(name, None)
        self._dying.pop(name, None)
        self._said.pop(name, None)
        self._free(name, self._actors.pop(name, None))

    def _free(self, name: str, actor: Any) -> None:
        """Give the place back; an actor that has ended does so itself a little later."""
        self._where.pop(name, None)
        self._placed.discard(name)
        if actor is not None:
            ray.kill(actor)
        group = self._groups.pop(name, None)
        if group is not None:
            remove_placement_group(group)


def _cause(text: str) -> tuple[Reason, str]:
    """What Ray gives as the cause of an actor's death, in our words."""
    words = " ".join(text.split())
    if "killed by `ray.kill`" in words or "placement group was removed" in words:
        return Reason.PREEMPTED, "was taken away in Ray (ray.kill, or its placement group was removed)"
    return Reason.NONE, words[:200]


def _nodes() -> dict[str, str]:
    """Ids of the nodes that live, by each name that people may know them by."""
    found: dict[str, str] = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            for name in (node.get("NodeName"), node.get("NodeManagerHostname"), node.get("NodeManagerAddress")):
                if name:
                    found[name] = node["NodeID"]
    return found


def _known_as(node: str) -> str:
    """The name of a node that may be dead."""
    for each in ray.nodes():  # type: ignore[no-untyped-call]
        if each["NodeID"] == node:
            return f" {each.get('NodeName') or each.get('NodeManagerHostname')}"
    return ""


def _selector(name: str) -> dict[str, str] | None:
    node = _nodes().get(name)
    return {"ray.io/node-id": node} if node else None


def _brief(problem: Exception) -> str:
    return " ".join(str(problem).split())[:200]


def _say(news: ray_talk.News) -> None:
    os.write(1, ray_talk.line(news))


def main(arguments: list[str]) -> None:
    """Serve one back end until its end of the pipe is closed."""
    parser = argparse.ArgumentParser(prog="python -m fedsched.executor.ray_driver")
    parser.add_argument("--address", required=True)
    parser.add_argument("--namespace", required=True)
    options = parser.parse_args(arguments)
    ray.init(
        address=options.address,
        namespace=options.namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    _say(ray_talk.Ready())
    driver, orders = Driver(), _Orders()
    while not orders.closed.is_set():
        for order in orders.take():
            driver.obey(order)
        driver.look()


class _Orders:
    """Lines from stdin, read by a thread."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._news = threading.Condition()
        self._waiting: list[ray_talk.Order] = []
        threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> list[ray_talk.Order]:
        with self._news:
            if not self._waiting:
                self._news.wait(LOOK_S)
            taken, self._waiting = self._waiting, []
            return taken

    def _read(self) -> None:
        for line in sys.stdin:
            with self._news:
                self._waiting.append(ray_talk.order_of(line))
                self._news.notify()
        self.closed.set()
        time.sleep(LOOK_S * 4)
        os._exit(0)  # whatever Ray is waiting for


if __name__ == "__main__":
    main(sys.argv[1:])
