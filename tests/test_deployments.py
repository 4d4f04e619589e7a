"""The shipped configurations are ones that the product takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from fedsched import local
from fedsched.config import AgentConfig, AggregatorConfig, ControllerConfig, FederationConfig, load
from fedsched.errors import InvalidConfiguration
from fedsched.executor.backends import directory

LOCAL = Path(__file__).parents[1] / "deployments" / "local"
KINDS: dict[str, type[BaseModel]] = {
    "agent": AgentConfig,
    "aggregator": AggregatorConfig,
    "controller": ControllerConfig,
    "federation": FederationConfig,
}


@pytest.mark.parametrize("path", sorted(LOCAL.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    """An example that does not start is worse than none."""
    load(KINDS[path.stem], path)


@pytest.mark.parametrize("kind", ["slurm", "ray"])
def test_the_shipped_agents_of_clusters_are_valid(kind: str) -> None:
    """An example that does not start is worse than none."""
    config = load(AgentConfig, LOCAL.parent / kind / "agent.yaml")

    assert config.executor.kind == kind
    assert directory(config) == Path("/shared/fedsched") / config.cluster


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{kind: mesos}", "executor is {'kind': 'mesos'}; there is no such kind of executor; kubernetes, local, ray"),
        ("{kind: slurm}", "executor.directory is missing"),
        (
            "{kind: ray, directory: /shared, adress: 'h:1'}",
            "executor.adress is not a known field; did you mean address?",
        ),
        (
            "{kind: kubernetes, image: i, mount: /, directory: /, tolerations: [{key: a, value: b, operator: Exists}]}",
            "operator Exists takes no value",
        ),
        (
            "{kind: kubernetes, image: i, directory: /f/d, mount: /f, tolerations: [{effect: NoSchedule}]}",
            "it needs a key, or operator Exists for all of them",
        ),
        (
            "{kind: kubernetes, image: i, directory: /elsewhere, mount: /fedsched}",
            "executor: directory is /elsewhere; it must lie below mount (/fedsched)",
        ),
    ],
)
def test_an_executor_that_cannot_be_is_told_before_anything_starts(tmp_path: Path, text: str, expected: str) -> None:
    """A job that no pod can see the files of would fail much later, and far away."""
    path = tmp_path / "agent.yaml"
    node = "{name: ip-10-0-0-1.ec2.internal, cpus: 1}"
    path.write_text(f"cluster: c\nstate_dir: s\netcd: 'h:1'\nnodes: [{node}]\nexecutor: {text}\n")
    with pytest.raises(InvalidConfiguration) as caught:
        load(AgentConfig, path)
    assert expected in caught.value.message


def test_the_shown_federation_is_what_up_starts_without_a_file() -> None:
    """A file that claims to show the defaults must show them."""
    assert load(FederationConfig, LOCAL / "federation.yaml") == local.small()


def test_all_problems_of_a_configuration_are_told_at_once_with_their_paths(tmp_path: Path) -> None:
    """An operator who corrects one line per try gives up."""
    path = tmp_path / "federation.yaml"
    path.write_text(
        "clusters:\n- nam: east\n  nodes: [{name: n1, cpus: -1}]\nslot: {length_s: 1, decision_s_max: 5}\nrounds: 3\n"
    )
    with pytest.raises(InvalidConfiguration) as caught:
        load(FederationConfig, path)
    message = str(caught.value)
    assert "clusters.0.nam is not a known field; did you mean name?" in message
    assert "clusters.0.nodes.0.cpus is -1" in message
    assert "decision_s_max is 5.0; it must be below length_s (1.0)" in message
    assert "rounds is 3" in message


@pytest.mark.parametrize(
    ("text", "expected"), [("a: [", "is not YAML"), ("- 1", "the file is [1]"), ("", "clusters is missing")]
)
def test_a_file_that_is_no_configuration_gives_one_clear_error(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "federation.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration, match=expected.replace("[", r"\[")):
        load(FederationConfig, path)
