"""What a configuration names, and what is told when this machine cannot have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsched.config import KubernetesExecutorConfig, LocalExecutorConfig, SlurmExecutorConfig
from fedsched.errors import InvalidConfiguration
from fedsched.executor.backends import open_tasks
from fedsched.executor.local import LocalTasks
from fedsched.executor.orders import Programs


def test_without_a_word_tasks_run_on_this_machine(tmp_path: Path) -> None:
    """The first try needs no cluster."""
    tasks = open_tasks(LocalExecutorConfig(), "c", tmp_path, Programs())
    tasks.close()

    assert isinstance(tasks, LocalTasks)


def test_without_slurms_commands_the_agent_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every job would fail, each at its user's cost."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(InvalidConfiguration, match="needs sbatch, scancel, squeue"):
        open_tasks(SlurmExecutorConfig(kind="slurm", directory=tmp_path), "c", tmp_path, Programs())


def test_without_a_way_to_kubernetes_the_agent_does_not_start(tmp_path: Path) -> None:
    """A wrong kubeconfig is found when the agent starts, not with the first job."""
    config = KubernetesExecutorConfig(
        kind="kubernetes", image="i", directory=tmp_path, mount=str(tmp_path), kubeconfig=str(tmp_path / "gone")
    )
    with pytest.raises(InvalidConfiguration, match="there is no way to a Kubernetes API server"):
        open_tasks(config, "c", tmp_path, Programs())
