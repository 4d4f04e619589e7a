"""Opens the back end that a cluster's configuration names; what one needs is imported only where it is used."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import assert_never

from fedsched.config import (
    AgentConfig,
    ExecutorConfig,
    KubernetesExecutorConfig,
    LocalExecutorConfig,
    RayExecutorConfig,
    SlurmExecutorConfig,
)
from fedsched.errors import InvalidConfiguration
from fedsched.executor.backend import TaskBackend
from fedsched.executor.orders import Programs


def directory(config: AgentConfig) -> Path:
    """Where the executor keeps what it knows: shared with the nodes, where tasks run on other machines."""
    match config.executor:
        case LocalExecutorConfig():
            return config.state_dir / "executor"
        case SlurmExecutorConfig() | KubernetesExecutorConfig() | RayExecutorConfig():
            return config.executor.directory / config.cluster
        case _:
            assert_never(config.executor)


def open_tasks(config: ExecutorConfig, cluster: str, root: Path, programs: Programs) -> TaskBackend:
    """The back end of a cluster whose directory is `root`.

    Raises:
        InvalidConfiguration: it cannot be used on this machine.
    """
    match config:
        case LocalExecutorConfig():
            from fedsched.executor.local import LocalTasks
            from fedsched.executor.pinning import of_this_machine

            devices = of_this_machine(pin_cores=config.pin_cores, gpus=config.gpus)
            return LocalTasks(root, programs, devices, config.cgroup, config.coordinator.needs())
        case SlurmExecutorConfig():
            from fedsched.executor.slurm import SlurmOptions, SlurmTasks

            missing = [program for program in ("sbatch", "scancel", "squeue") if shutil.which(program) is None]
            if missing:
                raise InvalidConfiguration(
                    f"the executor slurm needs {', '.join(missing)}, and there is none on the PATH",
                    "run the agent on a host with Slurm's commands",
                )
            python = config.python or sys.executable
            needs = config.coordinator.needs()
            return SlurmTasks(SlurmOptions(config.partition, config.account, config.options, python, needs))
        case RayExecutorConfig():
            if importlib.util.find_spec("ray") is None:
                raise InvalidConfiguration("the executor ray needs the package ray", "pip install 'fedsched[ray]'")
            from fedsched.executor.ray import RayOptions, RayTasks

            options = RayOptions(config.address, f"fedsched-{cluster}", config.coordinator.needs())
            return RayTasks(options, root / "ray.log")
        case KubernetesExecutorConfig():
            return _kubernetes(config, cluster)
        case _:
            assert_never(config)


def _kubernetes(config: KubernetesExecutorConfig, cluster: str) -> TaskBackend:
    try:
        from fedsched.executor.kubernetes import KubernetesOptions, KubernetesTasks, Toleration
    except ModuleNotFoundError as problem:
        raise InvalidConfiguration(
            f"the executor kubernetes needs the package {problem.name}", "pip install 'fedsched[k8s]'"
        ) from problem
    options = KubernetesOptions(
        image=config.image,
        namespace=config.namespace,
        claim=config.claim,
        mount=config.mount,
        kubeconfig=config.kubeconfig,
        context=config.context,
        python=config.python,
        service_account=config.service_account,
        node_selector=tuple(sorted(config.node_selector.items())),
        coordinator=config.coordinator.needs(),
        tolerations=tuple(Toleration(one.key, one.operator, one.value, one.effect) for one in config.tolerations),
    )
    return KubernetesTasks(options, cluster)
