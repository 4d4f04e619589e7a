"""The examples, by hand and as jobs: what a new user copies has to work."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsched import examples, jobfile
from tests.elastic.conftest import Job

FOLDER = Path(examples.__file__).parent
JobOf = Callable[..., Job]
SMALL = {
    "digits_mlp": {"EPOCHS": "1"},
    "digits_cnn": {"EPOCHS": "1", "BATCH": "479"},
    "char_transformer": {"EPOCHS": "1", "STEPS_PER_EPOCH": "3", "BATCH": "4"},
    "recommender": {"EPOCHS": "2", "USERS": "20000", "ITEMS": "300", "RATINGS": "4000"},
    "resnet50": {"SAMPLES": "8", "BATCH": "4"},
}


def by_hand(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **env: str) -> str:
    for key, value in {**SMALL[name], **env}.items():
        monkeypatch.setenv(key, value)
    importlib.import_module(f"fedsched.examples.{name}").main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_example_trains_by_hand_and_tells_what_it_reached(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody tries it before there is any cluster."""
    assert re.search(r"(loss|accuracy|error) \d+\.\d+", by_hand(name, monkeypatch, capsys))


def test_no_example_is_left_out_of_these_tests() -> None:
    """An example that nobody runs stops working."""
    scripts = {path.stem for path in FOLDER.glob("*.py") if "def main()" in path.read_text()}
    assert scripts == set(SMALL)


def test_half_precision_learns_as_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Autocast keeps parameters and gradients as they are; nothing else may be asked of the script."""
    plain, half = (
        float(by_hand("char_transformer", monkeypatch, capsys, STEPS_PER_EPOCH="20", AMP=amp).split()[-1])
        for amp in ("0", "1")
    )
    assert half < 4.0
    assert half == pytest.approx(plain, rel=0.02)


@pytest.mark.live
@pytest.mark.xdist_group("elastic")
@pytest.mark.parametrize("apart", [False, True])
def test_a_job_with_sparse_gradients_that_is_resized_reaches_what_it_does_by_hand(
    job_of: JobOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], apart: bool
) -> None:
    """Tables are cut by rows, and each server gets exactly the rows that its part of a table needs."""
    env = SMALL["recommender"] | {"EPOCHS": "12", "BATCH": "64"}
    reference = float(by_hand("recommender", monkeypatch, capsys, **env).split()[2])
    job = job_of(SCRIPT=str(FOLDER / "recommender.py"), **env)
    job.machines = {"worker-1": "away", "ps-1": "far"} if apart else {}
    job.start("ps-0", "worker-0")
    for step, members in ((5, ("ps-0", "ps-1", "worker-0", "worker-1")), (40, ("ps-1", "worker-1"))):
        job.until_step(step)
        reply = job.scale(*members)
        assert reply.ok, reply.message

    assert set(job.ended().values()) == {0}, job.logs()
    assert float(job.log("worker-1").split()[2]) == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_examples_job_file_is_valid_and_runs_a_script_that_is_there(path: Path) -> None:
    """It is the first thing that is submitted to a new cluster."""
    spec = jobfile.load(path)
    assert spec.run.split()[-1].rsplit(".", 1)[-1] in SMALL
