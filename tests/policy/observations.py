"""Observations to decide on: hand-made ones, and drawn ones that could really occur."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from msgspec.structs import replace

from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Range
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources


def node(name: str, cpus: int) -> Node:
    return Node(NodeName(name), Resources(cpus * 1000, 64_000))


def job(name: str, *, workers: tuple[int, int] = (1, 4), ps: tuple[int, int] = (1, 2), **fields: Any) -> JobView:
    """A job of one-CPU tasks, 10 epochs long, that arrived at its place in the alphabet."""
    defaults: dict[str, Any] = {
        "job_id": JobId(name),
        "job_type": "mlp",
        "workers": Range(*workers),
        "ps": Range(*ps),
        "worker_demand": Resources(1000, 100),
        "ps_demand": Resources(1000, 100),
        "epochs": 10.0,
        "progress_epochs": 0.0,
        "arrived_s": float(ord(name[0])),
        "waited_slots": 0,
    }
    return JobView(**{**defaults, **fields})


def observation(nodes: list[Node], jobs: list[JobView], slot: int = 1, time_s: float = 0.0) -> Observation:
    ordered = tuple(sorted(jobs, key=lambda view: (view.arrived_s, view.job_id)))
    return Observation(slot, 2.0, tuple(nodes), ordered, time_s)


@st.composite
def ranges(draw: st.DrawFn, least: int) -> Range:
    minimum = draw(st.integers(least, 2))
    return Range(minimum, draw(st.integers(max(minimum, least), 4)))


@st.composite
def views(draw: st.DrawFn, index: int) -> JobView:
    samples = st.builds(SpeedSample, st.integers(1, 4), st.integers(0, 4), st.floats(0.0, 10.0))
    epochs = draw(st.integers(1, 50))
    return JobView(
        job_id=JobId(f"job-{index}"),
        job_type=draw(st.sampled_from(["mlp", "vgg", "never-heard-of", "unknown"])),
        workers=draw(ranges(least=0)) if draw(st.booleans()) else Range(1, 4),
        ps=draw(st.one_of(st.just(Range(0, 0)), ranges(least=0))),
        worker_demand=Resources(draw(st.sampled_from([500, 1000, 3000])), 100),
        ps_demand=Resources(draw(st.sampled_from([500, 1000])), draw(st.sampled_from([100, 2000]))),
        epochs=float(epochs),
        progress_epochs=draw(st.floats(0, epochs * 1.5)),
        arrived_s=float(draw(st.integers(0, 3))),
        waited_slots=draw(st.integers(0, 1000)),
        speeds=tuple(draw(st.lists(samples, max_size=3))),
    )


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """Up to four nodes and six jobs; some run, where there was room for them, and some of those are pinned."""
    nodes = [
        Node(NodeName(f"n{index}"), Resources(draw(st.integers(1, 8)) * 1000, draw(st.sampled_from([1000, 8000]))))
        for index in range(draw(st.integers(1, 4)))
    ]
    waiting = [draw(views(index)) for index in range(draw(st.integers(0, 6)))]
    before = observation(nodes, waiting)
    budget = TentativePlacement(before)
    result = []
    for view in before.jobs:
        if draw(st.booleans()):
            workers = draw(st.integers(view.minimum.workers, max(view.minimum.workers, view.workers.maximum)))
            budget.grant(view.job_id, workers, draw(st.integers(view.ps.minimum, view.ps.maximum)))
        placement = budget.placement(view.job_id)
        result.append(replace(view, placement=placement, pinned=bool(placement) and draw(st.booleans())))
    return observation(nodes, result, slot=draw(st.integers(0, 50)))
