"""Benchmarks measure every policy in one run."""

from __future__ import annotations

import json

import pytest

from fedsched.cli.main import main


def test_the_core_benchmark_tells_every_policys_cost_beside_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    """A cost without its baseline from the same run says nothing on another machine."""
    assert main(["bench", "core", "--scenarios", "1", "-o", "json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["policy"] for cost in costs] == ["fifo", "dl2", "drf", "optimus", "srtf"]
    assert costs[0]["ratio"] == 1.0
    for cost in costs:
        assert 0 < cost["decision_ms_p50"] <= cost["decision_ms_p99"]
        assert cost["jobs"] == costs[0]["jobs"]
