"""A forked task must be what a freshly started process would be: checked by running the same program both ways."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import fedsched
from fedsched.core.ids import NodeName, TaskName
from fedsched.errors import StartFailed
from fedsched.executor import records
from fedsched.executor.launching import Launching
from fedsched.executor.local import shut_down
from fedsched.executor.processes import is_alive
from fedsched.executor.records import Attempt, ExitRecord, LauncherRecord, Layout, TaskOrder, TaskRecord
from fedsched.executor.task import PythonProgram, python_program
from tests.waiting import eventually

pytestmark = pytest.mark.live


class Tasks:
    """A launcher and a directory of scripts."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        self.layout = Layout(root)
        self.attempt = Attempt(root / "jobs" / "job-1", 1)
        for path in (self.attempt.tasks, self.attempt.logs):
            path.mkdir(parents=True)
        self.launching = Launching(self.layout, ("numpy", "grpc"), 1.0)
        self.count = 0

    def order(self, *argv: str, **fields: object) -> TaskOrder:
        self.count += 1
        values: dict[str, object] = {
            "request": f"request-{self.count}",
            "task": TaskName(f"worker-{self.count}"),
            "node": NodeName("n1"),
            "seq": 1,
            "argv": argv,
            "cwd": str(self.directory),
            "env": tuple(sorted({"PATH": os.environ["PATH"], "WHO": "task"}.items())),
            "fresh": False,
            "attempt_dir": str(self.attempt.path),
        }
        return TaskOrder(**(values | fields))  # type: ignore[arg-type]

    def script(self, text: str, name: str = "script.py") -> str:
        (self.directory / name).write_text(text)
        return name

    def run(self, order: TaskOrder) -> tuple[ExitRecord, str]:
        """Run to the end; how it ended and what it printed."""
        self.launching.start(1, order)
        path = self.attempt.exit(order.task)
        eventually(path.exists, "the task has ended")
        record = records.read(ExitRecord, path)
        assert record is not None
        return record, self.attempt.log(order.task).read_text()

    def run_afresh(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Whoever started the tests in the background had them ignore it, and a program would inherit that. Not with
        # `preexec_fn`: a fork of a process with threads now and then dies of what runs before its program.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.run(
                [sys.executable, *arguments],
                cwd=self.directory,
                env={"PATH": os.environ["PATH"], "WHO": "task"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=60,
            )
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def launcher(directory: Path) -> Iterator[Tasks]:
    tasks = Tasks(directory, directory / "root")
    yield tasks
    tasks.launching.close()
    shut_down(tasks.layout.root, grace_s=0.5)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    with launcher(tmp_path_factory.mktemp("launcher")) as tasks:
        yield tasks


@pytest.fixture
def tasks(shared: Tasks, tmp_path: Path) -> Tasks:
    """A directory of its own under a launcher that has served other tests before, as in real life."""
    shared.directory = tmp_path
    return shared


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Tasks]:
    with launcher(tmp_path) as tasks:
        yield tasks


PROBE = """
import json, os, signal, sys, threading
import helper
json.dump({
    "name": __name__, "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "who": dict(os.environ).get("WHO"),
    "environ": sorted(name for name in os.environ if name != "LC_CTYPE"),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "signals": [str(signal.getsignal(s)).split(" at ")[0] for s in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
    "threads": threading.active_count(), "stdin": sys.stdin.read(), "umask": os.umask(0),
    "helper": helper.__file__, "cached": sys.flags.safe_path,
}, sys.stdout, sort_keys=True)
"""


def test_a_script_finds_the_same_world_as_in_a_fresh_interpreter(tasks: Tasks) -> None:
    """A training script must not have to know that it was forked."""
    tasks.script("", "helper.py")
    script = tasks.script(PROBE)

    record, printed = tasks.run(tasks.order("python", script, "--rate", "0.1"))

    assert record.code == 0, printed
    assert json.loads(printed) == json.loads(tasks.run_afresh(script, "--rate", "0.1").stdout)


def test_a_module_finds_the_same_world_as_in_a_fresh_interpreter(tasks: Tasks) -> None:
    """`python -m` differs from a script in its path and its name."""
    tasks.script("", "helper.py")
    tasks.script(PROBE, "program.py")

    record, printed = tasks.run(tasks.order("python", "-u", "-m", "program", "x"))

    assert record.code == 0, printed
    assert json.loads(printed) == json.loads(tasks.run_afresh("-m", "program", "x").stdout)


ENDS = {
    "return": "print('done')",
    "code": "import sys; sys.exit(3)",
    "none": "raise SystemExit",
    "text": "import sys; sys.exit('no such data')",
    "at once": "import os; os._exit(4)",
    "exception": "def f():\n    raise ValueError('bad')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('worse') from e",
    "syntax": "def f(:\n    pass",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "terminate": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise KeyError('k')",
    "at exit": "import atexit, sys\natexit.register(lambda: print('bye', sys.last_value))\nraise ValueError('bad')",
    "thread": "import threading\nthreading.Timer(0.2, print, ['late']).start()\nprint('main ends')",
    "spawn": (
        "import multiprocessing as m\ndef f(x):\n    return x * x\n"
        "if __name__ == '__main__':\n    with m.get_context('spawn').Pool(1) as p:\n        print(p.map(f, [7]))"
    ),
}


@pytest.mark.parametrize("how", list(ENDS))
def test_a_script_ends_as_in_a_fresh_interpreter(tasks: Tasks, how: str) -> None:
    """Exit code, signal, traceback, what runs at exit: users read these, and the executor decides by them."""
    script = tasks.script(ENDS[how])

    record, printed = tasks.run(tasks.order("python", script))
    afresh = tasks.run_afresh(script)

    assert record.code == (afresh.returncode if afresh.returncode >= 0 else None)
    assert record.signal == (-afresh.returncode if afresh.returncode < 0 else None)
    if how == "interrupt":  # it passes through the launcher's frames
        assert printed.splitlines()[-1] == afresh.stdout.splitlines()[-1] == "KeyboardInterrupt"
    else:
        assert printed == afresh.stdout


def test_each_task_draws_numbers_of_its_own(tasks: Tasks) -> None:
    """Workers that all shuffle alike would train on the same samples."""
    script = tasks.script("import random, numpy, os\nprint(random.random(), numpy.random.rand(), os.urandom(4).hex())")

    draws = [tasks.run(tasks.order("python", script))[1].split() for _ in range(2)]

    assert all(first != second for first, second in zip(*draws, strict=True))


def test_the_start_is_on_record_before_the_program_runs(tasks: Tasks) -> None:
    """A task that nobody knows of could run twice."""
    script = tasks.script("import os, sys\nprint(open(sys.argv[1]).read())")
    order = tasks.order("python", script, str(tasks.attempt.task(TaskName(f"worker-{tasks.count + 1}"))))

    record, printed = tasks.run(order)

    seen = records.read(TaskRecord, tasks.attempt.task(order.task))
    assert seen is not None
    assert json.loads(printed)["pid"] == seen.pid == record.pid
    assert seen.request == record.request == order.request


def test_what_a_task_started_ends_with_it(tasks: Tasks) -> None:
    """A data loader that outlives its worker would hold memory that is promised to others."""
    record, printed = tasks.run(tasks.order("sh", "-c", "sleep 600 & echo $!"))

    assert record.code == 0
    eventually(lambda: not psutil.pid_exists(int(printed)), "the background process is gone")


def test_a_variable_that_is_read_at_start_gets_a_fresh_interpreter(tasks: Tasks) -> None:
    """PYTHONHASHSEED in a fork would be believed and not obeyed."""
    script = tasks.script("import sys\nprint(sys.flags.hash_randomization, 'numpy' in sys.modules)")
    env = (("PATH", os.environ["PATH"]), ("PYTHONHASHSEED", "0"))

    _, printed = tasks.run(tasks.order(sys.executable, script, env=env, fresh=True))
    _, forked = tasks.run(tasks.order(sys.executable, script))

    assert printed == "0 False\n"
    assert forked == "1 True\n"


def test_python_starts_fast_because_it_is_loaded(tasks: Tasks) -> None:
    """Only what is this interpreter without options of its own may be forked; everything else is executed."""
    me = sys.executable
    assert python_program(("python", "x.py", "-a"), me) == PythonProgram("x.py", "", ("-a",))
    assert python_program((me, "-u", "-m", "pkg.mod", "1"), me) == PythonProgram("", "pkg.mod", ("1",))
    for argv in [
        ("python", "-c", "1"),
        ("python",),
        ("/usr/bin/other", "x.py"),
        ("python", "-O", "x.py"),
        ("python", "d"),
    ]:
        assert python_program(argv, me) is None


def test_a_launcher_refuses_an_older_term(alone: Tasks) -> None:
    """Orders of an agent that was replaced may still be on their way."""
    alone.launching.start(5, alone.order("true"))

    with pytest.raises(StartFailed, match="of term 4; this cluster already obeys term 5"):
        alone.launching.start(4, alone.order("true"))


def test_a_second_launcher_gives_way_and_an_idle_one_ends(alone: Tasks) -> None:
    """Nothing may pile up on a machine whose agents come and go."""
    alone.run(alone.order("true"))
    first = records.read(LauncherRecord, alone.layout.launcher)
    assert first is not None
    other = Launching(alone.layout, (), 1.0)
    threads = [threading.Thread(target=each.start, args=(1, alone.order("true"))) for each in (other, alone.launching)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records.read(LauncherRecord, alone.layout.launcher) == first

    other.close()
    alone.launching.close()
    eventually(lambda: not is_alive(first.identity), "the idle launcher has ended")
    assert not alone.layout.launcher.exists()


def test_tasks_of_an_upgraded_fedsched_load_it_while_older_ones_run_on(
    alone: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher outlives agents and upgrades; what it once loaded must not meet what agents say today."""
    installed = tmp_path / "installed"
    shutil.copytree(
        Path(fedsched.__file__).parent, installed / "fedsched", ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.setenv("PYTHONPATH", str(installed))  # of the launcher
    env = (("PATH", os.environ["PATH"]), ("PYTHONPATH", str(installed)))
    script = alone.script("import fedsched; print(getattr(fedsched, 'OF_TODAY', 'of the past'))")
    waiting = alone.order("sh", "-c", "until test -e go; do sleep 0.05; done", env=env)
    alone.launching.start(1, waiting)
    first = records.read(LauncherRecord, alone.layout.launcher)
    assert first is not None
    _, printed = alone.run(alone.order("python", script, env=env))
    assert printed == "of the past\n"

    with (installed / "fedsched" / "__init__.py").open("a") as package:
        package.write("\nOF_TODAY = 'of today'\n")

    def says_today() -> bool:
        return alone.run(alone.order("python", script, env=env))[1] == "of today\n"

    eventually(says_today, "tasks load what is installed now")
    assert records.read(LauncherRecord, alone.layout.launcher) == first, "it goes on watching the task that runs"
    (tmp_path / "go").touch()
    eventually(alone.attempt.exit(waiting.task).exists, "the older task has ended, and that is on record")
    eventually(lambda: not is_alive(first.identity), "the older launcher has ended")
    assert says_today()
    later = records.read(LauncherRecord, alone.layout.launcher)
    assert later is not None
    assert later != first


def test_a_launcher_with_a_task_stays_until_it_has_ended(alone: Tasks) -> None:
    """Without an agent the end of a job must still be seen by somebody."""
    order = alone.order("sh", "-c", "sleep 2.5; exit 7")
    alone.launching.start(1, order)
    alone.launching.close()

    eventually(alone.attempt.exit(order.task).exists, "the end is on record")
    record = records.read(ExitRecord, alone.attempt.exit(order.task))
    assert record is not None
    assert record.code == 7


def test_a_long_directory_name_does_not_break_the_socket(tmp_path: Path) -> None:
    """Unix sockets have short names; users' directories do not."""
    directory = tmp_path / ("deep" * 30)
    directory.mkdir()
    with launcher(directory) as tasks:
        record, _ = tasks.run(tasks.order("true"))

    assert record.code == 0


def test_a_bad_start_is_an_exit_with_its_reason(tasks: Tasks) -> None:
    """The reason must reach the user even where there is no program to print it."""
    cases = [
        tasks.order("python", "gone.py"),
        tasks.order("gone"),
        tasks.order("true", cwd=str(tasks.directory / "gone")),
        tasks.order(str(tasks.directory)),
    ]
    errors = [tasks.run(order)[0].start_error for order in cases]

    assert errors[0] == f"script gone.py does not exist in {tasks.directory}"
    assert errors[1] == "command not found: gone"
    assert errors[2] == f"cannot enter the working directory {tasks.directory / 'gone'}: No such file or directory"
    assert errors[3] == f"cannot execute {tasks.directory}: Permission denied"
