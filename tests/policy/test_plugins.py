"""Policies by name: ours, other people's, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsched.cli.main import main
from fedsched.config import PolicyConfig, parse
from fedsched.core.placement import TentativePlacement
from fedsched.errors import InvalidConfiguration
from fedsched.policy import plugins, registry
from fedsched.policy.constant import Constant
from tests.policy.observations import job, node, observation

PROMISED = [
    "afs",
    "constant",
    "dl2",
    "drf",
    "edf",
    "fifo",
    "gavel_makespan",
    "gavel_maxmin",
    "gittins",
    "las",
    "las2d",
    "learned_speed",
    "lower_bound",
    "optimus",
    "oracle_greedy",
    "set",
    "sjf",
    "srsf",
    "srtf",
    "tetris",
    "themis",
]

CAUTIOUS = """
from pydantic import BaseModel
from fedsched.core.decision import Decision

class Options(BaseModel):
    most: int = 1

class Cautious:
    name, version, Options = "cautious", 0, Options

    def __init__(self, options):
        self.options = options

    def decide(self, observation, budget):
        for view in observation.jobs[: self.options.most]:
            budget.grant(view.job_id, view.minimum.workers, view.minimum.ps)
        return Decision(observation.slot, budget.allocations(), self.name)
"""

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one module and its entry points where the interpreter finds both, as pip would."""

    def put(package: str, entry_points: str, source: str) -> None:
        site = tmp_path / package
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{entry_points}\n")
        (site / f"{package}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    return put


def test_every_policy_that_was_promised_is_there_under_its_name() -> None:
    """Scenarios and scripts name them."""
    for name in PROMISED:
        assert plugins.available()[name] == "fedsched"
        assert registry.make(PolicyConfig(name=name)).name == name


def test_a_policy_of_another_package_is_configured_like_ours(install: Install) -> None:
    """Researchers bring their own without a change of ours, and get its options checked."""
    install("cautious_lab", "cautious = cautious_lab:Cautious", CAUTIOUS)
    assert plugins.available()["cautious"] == "cautious_lab"
    policy = registry.make(parse(PolicyConfig, {"name": "cautious", "options": {"most": 2}}, "mine.yaml"))
    seen = observation([node("n", 20)], [job("a"), job("b"), job("c")])
    assert len(policy.decide(seen, TentativePlacement(seen)).allocations) == 2
    with pytest.raises(InvalidConfiguration, match=r"mine\.yaml.*\n.*options: most is 'x'.*cautious"):
        parse(PolicyConfig, {"name": "cautious", "options": {"most": "x"}}, "mine.yaml")


def test_a_package_that_cannot_be_imported_is_one_clear_error(install: Install) -> None:
    """A stack of somebody else's module helps nobody; the others must still be usable."""
    install("broken_lab", "broken = broken_lab:Policy", "import not_installed_anywhere")
    assert "broken" in plugins.available(), "listing imports nothing"
    with pytest.raises(InvalidConfiguration, match="broken of package broken_lab cannot be imported") as problem:
        registry.make(PolicyConfig(name="broken"))
    assert "not_installed_anywhere" in problem.value.message
    assert "broken_lab" in problem.value.hint
    assert registry.make(PolicyConfig(name="drf")).name == "drf"


HANGS = "import threading\n{}\nclass Slow:\n    def __init__(self):\n        {}\n    def decide(self, o, b): ...\n"
WAITS = "threading.Event().wait(600)"


@pytest.mark.parametrize(
    ("source", "told"),
    [(HANGS.format(WAITS, "pass"), "not imported within 0.3 s"), (HANGS.format("", WAITS), "not made within 0.3 s")],
    ids=["its module", "its constructor"],
)
def test_a_policy_that_hangs_before_it_decides_is_one_clear_error(
    install: Install, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], source: str, told: str
) -> None:
    """An agent, or a sweep of a night, that never begins and says nothing; agents and simulations make them alike."""
    package = f"slow_lab_{len(source)}"
    install(package, f"slow = {package}:Slow", source)
    monkeypatch.setattr(plugins, "BEGIN_S_MAX", 0.3)
    with pytest.raises(InvalidConfiguration, match=f"policy slow.* was {told}"):
        registry.make(PolicyConfig(name="slow"))
    small = Path(__file__).parents[2] / "simulations" / "experiments" / "small.yaml"
    assert main(["sim", "run", str(small), "--policies", "slow", "--seeds", "1", "--workers", "1"]) != 0
    assert f"was {told}" in capfd.readouterr().err


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()", "BaseException('gone')"])
@pytest.mark.parametrize("where", ["its module", "its constructor"])
def test_whatever_a_policy_raises_before_it_decides_is_one_clear_error(
    install: Install, error: str, where: str
) -> None:
    """Also what is no `Exception`: an agent that ends by it says nothing, and looks as if somebody had stopped it."""
    package = f"raising_lab_{len(error)}_{len(where)}"
    module, constructor = (f"raise {error}", "pass") if where == "its module" else ("", f"raise {error}")
    install(package, f"raising = {package}:Slow", HANGS.format(module, constructor))
    with pytest.raises(InvalidConfiguration, match=f"policy raising.*: {error.partition('(')[0]}"):
        registry.make(PolicyConfig(name="raising"))


def test_what_is_no_policy_is_refused(install: Install) -> None:
    install("odd_lab", "odd = odd_lab:nothing", "nothing = 3")
    with pytest.raises(InvalidConfiguration, match="no method decide"):
        registry.make(PolicyConfig(name="odd"))


def test_a_name_that_two_packages_claim_is_refused_and_names_both(install: Install) -> None:
    """Which one decides must not hang on the order of folders."""
    install("other_lab", "drf = other_lab:Cautious", CAUTIOUS)
    with pytest.raises(InvalidConfiguration, match="drf is offered by fedsched and by other_lab"):
        registry.make(PolicyConfig(name="drf"))


@pytest.mark.parametrize(
    ("plain", "line"),
    [
        ({"name": "tetriss"}, "name is 'tetriss'; there is no policy 'tetriss'; did you mean tetris?"),
        ({"name": "constant", "options": {"worker": 3}}, "options: worker is not a known field; did you mean workers?"),
        ({"name": "constant", "options": {"ps": -1}}, "options: ps is -1; input should be greater than or equal to 0"),
        ({"name": "drf", "options": {"ps": 1}}, "options: policy drf has no options, but ps is given"),
    ],
)
def test_a_mistake_in_the_configuration_is_found_when_it_is_read(plain: dict[str, object], line: str) -> None:
    """Not in the middle of a run."""
    with pytest.raises(InvalidConfiguration) as problem:
        parse(PolicyConfig, plain, "mine.yaml")
    assert line in problem.value.message


def test_options_reach_the_policy() -> None:
    policy = registry.make(PolicyConfig(name="constant", options={"workers": 3, "ps": 2}))
    assert isinstance(policy, Constant)
    seen = observation([node("n", 20)], [job("a")])
    assert str(policy.decide(seen, TentativePlacement(seen)).allocations[0][1]) == "3w+2ps"


def test_reading_a_configuration_imports_no_solver() -> None:
    """Every command reads one; two seconds of imports before each answer would be felt."""
    code = (
        "import sys; from fedsched.config import PolicyConfig; PolicyConfig(name='gavel_maxmin');"
        "from fedsched.policy import registry; print([m for m in ('scipy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
