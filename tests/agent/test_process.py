"""What every server process does when something goes wrong."""

from __future__ import annotations

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
