"""Recorded journals are repeated in virtual time, now and by every later version; any change of the core is noticed.

`demo_east.jsonl` is what the agent of the cluster east wrote in a run of `fedsched demo`: real elastic training, DL2
deciding, three jobs that grow and shrink. `ranks.jsonl` is of `tests/agent/test_journal.py`: las2d with preemption.
Paths in them were shortened. A change of the core that gives other commands needs them to be recorded anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.cli.main import main
from fedsched.config import PolicyConfig
from fedsched.core.placement import TentativePlacement, place
from fedsched.core.scheduler import Scheduler
from fedsched.errors import FedschedError, InvalidInput
from fedsched.sim.replaying import Differs, replay, shadow

HERE = Path(__file__).parent
RECORDED = sorted(HERE.glob("*.jsonl"))
DEMO = HERE / "demo_east.jsonl"
RANKS = HERE / "ranks.jsonl"
Line = dict[str, Any]


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, changed: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    return path


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_agents_recorded_is_repeated_to_the_last_command(path: Path) -> None:
    """A journal that does not replay explains nothing, and a core that simulates something else predicts nothing."""
    found = replay(path)
    told = [line for line in lines(path) if "event" in line]
    assert found.events == len(told) > 40
    assert found.commands == sum(len(line["commands"]) for line in told)
    assert found.orders == sum(command["_"] != "SaveJob" for line in told for command in line["commands"])
    assert found.decisions > 5
    assert found.length_s == pytest.approx(max(line["event"]["time_s"] for line in told) - found.first_s)


def drop_a_command(line: Line) -> None:
    line["commands"].pop()


def repeat_a_command(line: Line) -> None:
    line["commands"].append(line["commands"][-1])


def swap_commands(line: Line) -> None:
    line["commands"].reverse()


def another_seq(line: Line) -> None:
    order = next(command for command in line["commands"] if "seq" in command)
    order["seq"] += 1


def another_message(line: Line) -> None:
    save = next(command for command in line["commands"] if command["_"] == "SaveJob")
    save["status"]["message"] += " or so"


WAYS: list[tuple[Callable[[Line], None], Callable[[Line], object]]] = [
    (drop_a_command, lambda line: line["commands"]),
    (repeat_a_command, lambda line: line["commands"]),
    (swap_commands, lambda line: len(line["commands"]) > 1 and line["commands"][0] != line["commands"][-1]),
    (another_seq, lambda line: any("seq" in command for command in line["commands"])),
    (another_message, lambda line: any(command["_"] == "SaveJob" for command in line["commands"])),
]


@given(way=st.sampled_from(WAYS), data=st.data())
def test_one_altered_command_anywhere_is_noticed_at_its_line(
    tmp_path_factory: pytest.TempPathFactory,
    way: tuple[Callable[[Line], None], Callable[[Line], object]],
    data: st.DataObject,
) -> None:
    """The first difference is where to look; one found later is only what followed."""
    alter, can = way
    changed = lines(DEMO)
    number = data.draw(st.sampled_from([n for n, line in enumerate(changed) if "event" in line and can(line)]))
    alter(changed[number])
    path = write(tmp_path_factory.mktemp("altered") / "journal.jsonl", changed)
    with pytest.raises(Differs) as problem:
        replay(path)
    assert problem.value.message.startswith(f"{path}:{number + 1}: command ")


def test_an_altered_decision_is_noticed_by_what_follows_from_it(tmp_path: Path) -> None:
    """A recorded decision is an input: with another one, other tasks start."""
    changed = lines(DEMO)
    number, line = next(
        (n, line)
        for n, line in enumerate(changed)
        if line.get("event", {}).get("_") == "PolicyDecided"
        and any(command["_"] == "StartJob" for command in line["commands"])
    )
    line["event"]["decision"]["allocations"].clear()
    path = write(tmp_path / "journal.jsonl", changed)
    with pytest.raises(Differs) as problem:
        replay(path)
    assert problem.value.message.startswith(f"{path}:{number + 1}: ")


def test_a_core_that_places_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the whole test is for: somebody changes the core and thinks that nothing has changed."""

    def pack(observation: Any, allocations: Any, keep_running: bool, kinds: Any, rule: str) -> TentativePlacement:
        return place(observation, allocations, keep_running, kinds, "pack")

    monkeypatch.setattr("fedsched.core.scheduler.place", pack)
    with pytest.raises(Differs) as problem:
        replay(DEMO)
    assert "PolicyDecided" in problem.value.message
    assert "recorded: " in problem.value.message
    assert "placement" in problem.value.message


def test_a_core_that_forgets_a_reward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.handle

    def forgetful(self: Scheduler, event: Any) -> Any:
        return [command for command in real(self, event) if type(command).__name__ != "RewardSlot"]

    monkeypatch.setattr(Scheduler, "handle", forgetful)
    with pytest.raises(Differs, match="recorded: RewardSlot"):
        replay(DEMO)


def test_another_configuration_of_the_scheduler_is_noticed(tmp_path: Path) -> None:
    changed = lines(DEMO)
    changed[0]["nodes"][0]["capacity"]["cpu_milli"] = 1000
    with pytest.raises(Differs):
        replay(write(tmp_path / "journal.jsonl", changed))


def test_a_journal_that_was_cut_off_is_repeated_with_its_older_part(tmp_path: Path) -> None:
    """An agent that runs for months keeps two files; the newer begins in the middle."""
    whole = lines(DEMO)
    write(tmp_path / "journal.jsonl.old", whole[:30])
    newer = write(tmp_path / "journal.jsonl", whole[30:])
    assert replay(newer).events == len(whole) - 1


def test_what_is_before_the_first_agents_start_is_left_out_and_counted(tmp_path: Path) -> None:
    whole = lines(DEMO)
    both = write(tmp_path / "journal.jsonl", [*whole[30:], *whole])
    found = replay(both)
    assert (found.skipped, found.events) == (len(whole) - 30, len(whole) - 1)
    with pytest.raises(InvalidInput, match="does not say what its scheduler is made of"):
        replay(write(tmp_path / "journal.jsonl", whole[30:]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not say what its scheduler is made of"),
        ("3\n4\n", ":1: "),
        ('{"event": {"_": "Rain"}, "commands": []}\n{}\n', ":1: unknown event or command 'Rain'"),
        ('{"commands": []}\n{}\n', ":1: event is missing"),
        ("not json\nat all\n", ":1: "),
        ("[" * 100_000 + "]" * 100_000 + "\n{}\n", ":1: "),
    ],
)
def test_what_is_no_journal_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput) as problem:
        replay(path)
    assert said in problem.value.message


def first_node(line: Line) -> dict[str, Any]:
    node: dict[str, Any] = line["nodes"][0]
    return node


@pytest.mark.parametrize("value", [-1, -(2**40), 2**47, 2**63, "many", None])
@pytest.mark.parametrize("field", ["cpu_milli", "memory_mib", "gpu_milli"])
def test_a_capacity_that_no_node_has_is_told_with_its_line_and_field(tmp_path: Path, field: str, value: Any) -> None:
    """It was a broken invariant of the scheduler, some hundred lines later."""
    changed = lines(DEMO)
    first_node(changed[0])["capacity"][field] = value
    with pytest.raises(InvalidInput) as problem:
        replay(write(tmp_path / "journal.jsonl", changed))
    assert problem.value.message.startswith(f"{tmp_path / 'journal.jsonl'}:1: ")
    assert field in problem.value.message or "out of range" in problem.value.message


@given(data=st.data())
def test_whatever_a_damaged_journal_says_is_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A disk that lost a sector, an editor, a tool that cut lines: the answer is the line, never a stack trace."""
    text = DEMO.read_text()
    begin = data.draw(st.integers(0, len(text) - 2))
    end = data.draw(st.integers(begin + 1, min(len(text) - 1, begin + data.draw(st.sampled_from([1, 8, 200, 20_000])))))
    damage = data.draw(st.sampled_from(["", "0", "-1", "null", "\n", "\0\0\0", "é", '"', "1e999", "[]", "{}"]))
    path = tmp_path_factory.mktemp("damaged") / "journal.jsonl"
    path.write_text(text[:begin] + damage + text[end:])
    problem: FedschedError | None = None
    try:
        replay(path)  # what makes no difference to a scheduler, none may make here
    except (Differs, InvalidInput) as told:
        problem = told
    assert problem is None or (str(path) in problem.message and problem.hint)


def test_a_diverging_loss_is_repeated_like_any_other(tmp_path: Path) -> None:
    """Not a number equals nothing, not even itself; a job that diverges must not look like a changed core."""
    text = DEMO.read_text()
    losses = {str(line["event"]["progress"]["loss"]) for line in lines(DEMO) if line.get("event", {}).get("progress")}
    for loss in losses - {"None"}:
        text = text.replace(f'"loss":{loss}', '"loss":NaN')
    assert "NaN" in text
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    assert replay(path).skipped == 0


def test_the_command_says_identical_or_names_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For whoever upgrades an agent and wants to know whether it would have done the same."""
    path = tmp_path / "journal.jsonl"
    shutil.copy(DEMO, path)
    assert main(["sim", "replay", "--journal", str(path), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"]
    assert told["events"] > 40
    assert main(["sim", "replay", "--journal", str(path)]) == 0
    assert "identical" in capsys.readouterr().out
    changed = lines(path)
    number = next(n for n, line in enumerate(changed) if line.get("event", {}).get("_") == "JobStarted")
    another_message(changed[number])
    write(path, changed)
    assert main(["sim", "replay", "--journal", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"[FS300] {path}:{number + 1}: command 1 of ")
    assert "differs after JobStarted at " in said
    assert "  recorded: SaveJob of job 1 with status.message ' or so'\n  replayed: SaveJob of job 1 with" in said


def test_a_candidate_can_be_compared_with_what_a_journal_holds() -> None:
    """Before it is let near a cluster, and with nothing but the cluster's own record."""
    same = shadow(DEMO, PolicyConfig(name="drf"))
    assert (same.cases, same.valid) == (same.valid, same.cases)
    assert same.active.policy == "dl2"
    assert not same.running
    other = shadow(DEMO, PolicyConfig(name="constant", options={"workers": 1, "ps": 1}))
    assert other.candidate_worth != same.candidate_worth
    assert other.cases == same.cases
    with pytest.raises(InvalidInput, match="holds no slot in which a policy was asked for allocations"):
        shadow(RANKS, PolicyConfig(name="drf"))
