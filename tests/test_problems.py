"""What is wrong with a file is told in its reader's words, for every field of every kind of file."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fedsched import problems as telling
from fedsched.config import AgentConfig, AggregatorConfig, ControllerConfig, FederationConfig, Tree
from fedsched.jobfile import JobFile
from fedsched.problems import problems
from fedsched.sim.experiment import ExperimentConfig

FILES: tuple[type[BaseModel], ...] = (
    AgentConfig,
    AggregatorConfig,
    ControllerConfig,
    ExperimentConfig,
    FederationConfig,
    JobFile,
)
NODE = {"name": "a", "cpus": 1}


def told(kind: type[BaseModel], plain: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(plain)
    return problems(kind, caught.value)


@pytest.mark.parametrize("kind", FILES)
def test_a_field_in_the_wrong_part_is_never_said_to_be_called_as_it_is(kind: type[BaseModel]) -> None:
    """`workers is not a known field; did you mean workers?` sends its reader nowhere."""
    elsewhere = [path for path in telling._paths(kind).values() if "." in path]
    unknown = {path.rpartition(".")[2]: path for path in elsewhere if path.rpartition(".")[2] not in kind.model_fields}
    assert unknown
    lines = told(kind, dict.fromkeys(unknown, 1))
    for name in unknown:
        line = next(line for line in lines if line.startswith(f"{name} is not a known field"))
        assert not line.endswith(f"did you mean {name}?")
        assert "did you mean" in line


@pytest.mark.parametrize("kind", FILES)
def test_whatever_stands_in_a_fields_place_no_class_of_the_program_is_named(kind: type[BaseModel]) -> None:
    """Who writes YAML knows no dictionaries, tuples, instances or regular expressions."""
    for wrong in ("10s", [1], 7, -1, {"nothing": {"there": 1}}, [{"nothing": 1}], True, []):
        for line in told(kind, dict.fromkeys(kind.model_fields, wrong)):
            assert not re.search(r"dictionary|tuple|instance|Part\b|Config\b|pattern|after validation", line), line


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_of_fields_names_the_fields(kind: type[BaseModel]) -> None:
    (line,) = told(kind, "x")
    assert line.startswith("the file is 'x'; fields were expected: ")
    assert all(name in line for name in kind.model_fields)


@pytest.mark.parametrize(
    ("plain", "lines"),
    [
        (
            {"clusters": [{"name": "north", "nodes": [{"name": "n1", "cpus": 4, "memory": "4GB"}]}]},
            ["clusters.0.nodes.0.memory is not a known field; did you mean memory_gb?"],
        ),
        (
            {"clusters": [{"name": "north", "nodes": [NODE], "policy": {"nme": "dl2"}}]},
            ["clusters.0.policy.nme is not a known field; did you mean name?"],
        ),
        (
            {"clusters": [{"name": "north", "nodes": []}]},
            ["clusters.0.nodes is []; at least 1 item was expected"],
        ),
        (
            {"clusters": [{"name": "north", "nodes": [NODE], "quorum": 2}]},
            ["clusters.0.quorum is not a known field; did you mean rounds.quorum?"],
        ),
        (
            {"controller": "here", "clusters": [{"name": "north", "nodes": [NODE]}]},
            ["controller is 'here'; host:port was expected"],
        ),
    ],
)
def test_one_mistake_in_a_federation_is_one_line(plain: dict[str, Any], lines: list[str]) -> None:
    """A list that only seems too short, because what is in it is wrong, is no second mistake."""
    assert told(FederationConfig, plain) == lines


def test_a_tagged_part_is_compared_with_the_member_that_its_tag_names() -> None:
    plain = {"cluster": "c", "state_dir": "s", "etcd": "h:1", "nodes": [NODE]}
    executor = {"kind": "slurm", "directry": "/d"}
    assert told(AgentConfig, {**plain, "executor": executor}) == [
        "executor.directory is missing",
        "executor.directry is not a known field; did you mean directory?",
    ]


def test_every_file_to_compare_with_is_there() -> None:
    """A hint that leads nowhere is worse than none."""
    from pathlib import Path

    root = Path(__file__).parents[1]
    for kind in FILES:
        if issubclass(kind, Tree):
            assert (root / kind.shown_in).is_file(), kind
