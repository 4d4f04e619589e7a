"""A real Slurm on this machine: munged, slurmctld and two slurmd that each play a node, all in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from fedsched.executor.backend import TaskBackend
from fedsched.executor.orders import Programs
from fedsched.executor.records import Attempt
from fedsched.executor.slurm import SlurmOptions, SlurmTasks
from tests.executor.cluster import Cluster, Recorded, told_to_run
from tests.waiting import eventually

NODES = ("n1", "n2")
CONFIGURATION = """
ClusterName=fedsched
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool_%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
KillWait=2
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=4
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=usual Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""


class Slurm:
    """The daemons; `SLURM_CONF` leads every Slurm command of this process to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for folder in ("state", *(f"spool_{node}" for node in NODES)):
            (root / folder).mkdir()
        key = root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        conf = root / "slurm.conf"
        conf.write_text(CONFIGURATION.format(host=socket.gethostname(), ports=_free_ports(3), root=root))
        os.environ["SLURM_CONF"] = str(conf)
        munge = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={root}/munge.{end}" for option, end in munge.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        eventually((root / "munge.sock").exists, "munged listens")
        self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(conf)])
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def start_node(self, node: str) -> None:
        self._start(node, ["slurmd", "-D", "-N", node, "-f", str(self.root / "slurm.conf")])

    def wait_for_nodes(self) -> None:
        eventually(
            lambda: self.ask("sinfo", "-h", "-p", "usual", "-t", "idle,mixed,alloc", "-o", "%D") == "2",
            "nodes are up",
            60.0,
        )

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip()

    def stop(self) -> None:
        self.ask("scancel", "--full", "--signal=KILL", "--user=root")
        self.ask("scancel", "--user=root")
        until = time.monotonic() + 15
        while self.ask("squeue", "-h") and time.monotonic() < until:
            time.sleep(0.2)
        for daemon in reversed(list(self.daemons.values())):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        os.environ.pop("SLURM_CONF")

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )


class OnSlurm:
    """A cluster whose tasks are batch jobs."""

    join_s = 60.0

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm

    def open(self, root: Path, programs: Programs) -> TaskBackend:
        return SlurmTasks(SlurmOptions())

    def end(self, root: Path) -> None:
        self.slurm.ask("scancel", "--full", "--signal=KILL", "--user=root")
        self.slurm.ask("scancel", "--user=root")
        for node, daemon in list(self.slurm.daemons.items()):
            if node in NODES and daemon.poll() is not None:
                self.slurm.start_node(node)
        eventually(lambda: not self.slurm.ask("squeue", "-h"), "Slurm has no job left", 60.0)
        self.slurm.wait_for_nodes()

    def pids(self, attempt: Attempt) -> dict[str, int]:
        return told_to_run(attempt)

    def preempt(self, cluster: Recorded, task: str) -> None:
        node = cluster.record(task).node
        self.slurm.ask(
            "sbatch", "-p", "urgent", "-w", node, "-c", "8", "--mem=10", "--wrap", "sleep 1", "-o", "/dev/null"
        )

    def kept(self, cluster: Cluster) -> set[str]:
        """Slurm itself forgets jobs that have ended."""
        return set(self.slurm.ask("squeue", "-h", "-o", "%A", "--states=PENDING,RUNNING,COMPLETING").split())

    def lose(self, cluster: Recorded, task: str) -> None:
        """Only the daemon dies: the tasks of a node that is cut off run on, and nobody can reach them."""
        daemon = self.slurm.daemons[cluster.record(task).node]
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()


def is_installed() -> bool:
    return all(shutil.which(program) for program in ("munged", "slurmctld", "slurmd", "sbatch"))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
