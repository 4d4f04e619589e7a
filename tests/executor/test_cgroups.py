"""Limits of tasks by cgroups: with a kernel that has them, this machine's or one that is a process; and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedsched.core.events import JobStarted
from fedsched.executor.cgroups import below, candidates
from tests.executor.cluster import Cluster, placement

ROOT = Path(__file__).parents[2]
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--noconftest", "tests/executor/cgrouped.py"]
INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /mnt
mount -t cgroup2 none /sys/fs/cgroup
cd {root}
export TMPDIR=/mnt PYTHONDONTWRITEBYTECODE=1 HOME=/mnt PATH={path}
{python} -c '
import fcntl, socket, struct
made = socket.socket()
fcntl.ioctl(made, 0x8914, struct.pack("16sh14x", b"lo", 0x49))  # SIOCSIFFLAGS: up and running
'
{python} {arguments} > {folder}/told 2>&1
echo $? > {folder}/code
sync
echo o > /proc/sysrq-trigger
sleep 10
"""


def test_tasks_are_kept_to_what_they_were_given(tmp_path: Path) -> None:
    """What a job asks for is what others count on not being used."""
    here = below(candidates(), tmp_path)
    if here is not None:
        here.close()
        done = subprocess.run([sys.executable, *PYTEST], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout
        return
    kernel = shutil.which("linux.uml", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/bin")
    if kernel is None:
        problem = "needs cgroups of version 2 that may be written to, or Debian's package user-mode-linux"
        if "CI" in os.environ:
            pytest.fail(problem)
        pytest.skip(problem)
    init = tmp_path / "init"
    words = {"root": ROOT, "folder": tmp_path, "python": sys.executable, "path": os.environ["PATH"]}
    init.write_text(INIT.format(arguments=" ".join(PYTEST), **words))
    init.chmod(0o755)
    command = [kernel, "rootfstype=hostfs", "rootflags=/", "rw", "mem=1500M", f"init={init}", f"uml_dir={tmp_path}"]
    with (tmp_path / "console").open("wb") as console:
        subprocess.run(
            [*command, "con=null", "con0=null,fd:1"],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            timeout=400,
        )
    told = tmp_path / "told"
    console_text = (tmp_path / "console").read_text(errors="replace")[-2000:]
    assert told.exists(), console_text
    assert (tmp_path / "code").read_text() == "0\n", told.read_text()[-6000:] + console_text


@pytest.mark.live
def test_without_cgroups_tasks_run_all_the_same_and_that_is_told_once(cluster: Cluster) -> None:
    """A laptop, an old system or a container has none; its owner should know what is not kept."""
    cluster.place.cgroup = str(cluster.root)  # type: ignore[attr-defined]  # no cgroup at all
    cluster.start(cluster.spec(), placement(2, 1))
    cluster.wait_for(JobStarted)

    log = cluster.layout.launcher_log.read_text()
    assert log.count("tasks are not kept to the memory and processor time that they were given") == 1
