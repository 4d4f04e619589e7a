"""What every server process does when something goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, threading
from pathlib import Path
from fedsched.config import ControllerConfig
from fedsched.process import on_signal, run_from
import fedsched.process

def main(config):
    ended = threading.Event()
    with on_signal(ended.set):
        source = compile("def work():\\n    raise RuntimeError('a thread of ours is broken')\\n", "work", "exec")
        space = {"__name__": NAME}
        exec(source, space)
        threading.Thread(target=space["work"], name="worker").start()
        return 0 if ended.wait(WAIT_S) else 9

sys.exit(run_from(Path(sys.argv[1]), "controller", ControllerConfig, main))
"""
CONFIG = "listen: 127.0.0.1:1\netcd: 127.0.0.1:2\nstate_dir: /nowhere\n"


def run(tmp_path: Path, name: str, wait_s: float) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "controller.yaml"
    config.write_text(CONFIG)
    program = f"NAME, WAIT_S = {name!r}, {wait_s}\n{PROGRAM}"
    return subprocess.run(
        [sys.executable, "-c", program, config], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_process_whose_thread_fails_ends_and_says_why(tmp_path: Path) -> None:
    """A process that goes on without one of its threads hangs, and nobody sees that it does."""
    done = run(tmp_path, "fedsched.something", 30.0)
    assert done.returncode == 1
    assert "a thread of ours is broken" in done.stderr


def test_a_librarys_failing_thread_ends_nothing(tmp_path: Path) -> None:
    """gRPC replaces its own threads; that must not cost a cluster its agent."""
    done = run(tmp_path, "grpc.something", 0.2)
    assert done.returncode == 9
    assert "a thread of ours is broken" in done.stderr


def test_leaving_waits_for_nobody_and_loses_no_word(tmp_path: Path) -> None:
    """Whoever stops a federation waits for each of its processes to end."""
    program = (
        "import atexit, sys, threading, time\n"
        "from fedsched.process import leave\n"
        "atexit.register(time.sleep, 300)\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "sys.stdout.write('the last word')\n"
        "leave(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "the last word")


def test_decisions_stay_on_one_core_and_jobs_keep_theirs() -> None:
    """A learned policy that spreads a small product over all cores takes them from the jobs that it schedules."""
    program = """
import json, os, threading
from fedsched.config import PolicyConfig
from fedsched.learn import kinds
from fedsched.policy import registry
from fedsched.process import keep_to_one_core

registry.make(PolicyConfig(name="learned_speed"))
import torch
from threadpoolctl import threadpool_info

def threads():
    found = [(one["user_api"], one["num_threads"]) for one in threadpool_info() if one["user_api"] == "blas"]
    return [*found, ("torch", torch.get_num_threads())]

threads_before = threads()
keep_to_one_core()
told = []
thread = threading.Thread(target=lambda: told.append(threads()))
thread.start()
thread.join()
environment = [os.environ[name] for name in os.environ if name.endswith("_NUM_THREADS")]
print(json.dumps({"before": threads_before, "after": told[0], "environment": environment}))
"""
    wide = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, env=wide
    )
    told = json.loads(done.stdout)
    assert {name for name, _ in told["before"]} == {"blas", "torch"}
    assert max(count for _, count in told["before"]) == 2
    assert {count for _, count in told["after"]} == {1}
    assert told["environment"] == ["2", "2", "2"], "jobs inherit the agent's environment"


def test_an_agent_that_only_decides_loads_nothing_to_learn_with() -> None:
    """It starts in a second less, and leaves 200 MB more to jobs."""
    program = """
import sys
from fedsched.agent import app
from fedsched.config import LearningConfig, PolicyConfig
from fedsched.process import keep_to_one_core

policy = app.registry.make(PolicyConfig(name="drf"))
assert app.kinds.learner_for(policy, LearningConfig(), 64) is None
keep_to_one_core()
print([name for name in ("torch", "flwr", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
