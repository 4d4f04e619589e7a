"""Opens the back end that a cluster's configuration names; what one needs is imported only where it is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import assert_never

from fedsched.config import AgentConfig, ExecutorConfig, LocalExecutorConfig, SlurmExecutorConfig
from fedsched.executor.backend import TaskBackend
from fedsched.executor.orders import Programs


def directory(config: AgentConfig) -> Path:
    """Where the executor keeps what it knows: shared with the nodes, where tasks run on other machines."""
    match config.executor:
        case LocalExecutorConfig():
            return config.state_dir / "executor"
        case SlurmExecutorConfig():
            return config.executor.directory / config.cluster
        case _:
            assert_never(config.executor)


def open_tasks(config: ExecutorConfig, root: Path) -> TaskBackend:
    """The back end of a cluster whose directory is `root`.

    Raises:
        InvalidConfiguration: it cannot be used on this machine.
    """
    match config:
        case LocalExecutorConfig():
            from fedsched.executor.local import LocalTasks

            return LocalTasks(root, Programs())
        case SlurmExecutorConfig():
            from fedsched.executor.slurm import SlurmOptions, SlurmTasks

            python = config.python or sys.executable
            return SlurmTasks(SlurmOptions(config.partition, config.account, config.options, python))
        case _:
            assert_never(config)
