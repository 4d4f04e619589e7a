"""The session as a script sees it, without a job around it, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from fedsched import elastic
from fedsched.elastic import checkpoint
from fedsched.elastic.model import BlockSpec, ModelSpec
from fedsched.elastic.sampling import Sampling
from fedsched.errors import CorruptCheckpoint, InvalidInput


class Strange(torch.optim.SGD):
    """An optimiser with a memory that belongs to no parameter."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, lr=0.1)  # type: ignore[arg-type]
        self.state["trust"] = torch.ones(())  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "closure"),
        (Strange, "belongs to no single parameter"),
    ],
)
def test_an_optimiser_that_cannot_be_split_is_refused_before_training_starts(
    kind: type[torch.optim.Optimizer], why: str
) -> None:
    """Trained silently wrong is the worst that can happen to a model."""
    model = nn.Linear(2, 1)
    with pytest.raises(InvalidInput, match=why):
        elastic.join(model, kind(model.parameters()))  # type: ignore[call-arg]


def test_an_optimiser_that_servers_cannot_import_is_refused() -> None:
    """It would fail later, on another machine, with an error nobody understands."""

    class Local(torch.optim.SGD):
        pass

    model = nn.Linear(2, 1)
    with pytest.raises(InvalidInput, match="put it in a module of its own"):
        elastic.join(model, Local(model.parameters(), lr=0.1))


def test_parameters_outside_the_model_are_refused() -> None:
    """They would stay where they are while everything else is trained."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    session = elastic.join(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(InvalidInput, match="2 parameters that are not in the model"):
        session.batches(TensorDataset(torch.ones(4, 2)), batch_size=2, epochs=1)


def test_a_batch_without_its_step_and_a_step_without_its_batch_are_told() -> None:
    """In a job, the other workers would wait for this one for ever."""
    model = nn.Linear(2, 1)
    session = elastic.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidInput, match="without a batch"):
        session.step(model(torch.ones(1, 2)).sum())
    with pytest.raises(InvalidInput, match="not answered"):
        for _ in session.batches(TensorDataset(torch.ones(4, 2)), batch_size=2, epochs=1):
            pass
    with pytest.raises(InvalidInput, match="a second time"):
        session.batches(TensorDataset(torch.ones(4, 2)), batch_size=2, epochs=1)


def test_by_hand_it_is_ordinary_training() -> None:
    """The plain loop over the same batches gives the same bits, the schedule's learning rates included."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(20, 3), torch.randn(20, 1)
    mine, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(mine.state_dict())
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    session = elastic.join(mine, optimizer, seed=4, scheduler=scheduler)
    for batch, wanted in session.batches(TensorDataset(inputs, labels), batch_size=6, epochs=3):
        session.step(nn.functional.mse_loss(mine(batch), wanted))
    assert (session.steps, session.epoch, session.is_chief) == (12, 2, True)

    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    sampling = Sampling(20, 6, 3, seed=4)
    for step in range(sampling.steps):
        index = sampling.batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(inputs[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    assert torch.equal(mine.weight, plain.weight)
    assert torch.equal(mine.bias, plain.bias)


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    epochs=st.integers(1, 3),
    workers=st.lists(st.integers(1, 5), min_size=1, max_size=7),
)
def test_every_epoch_uses_each_sample_once_however_many_workers_each_step_has(
    samples: int, batch_size: int, epochs: int, workers: list[int]
) -> None:
    """A resize must not make a sample count twice, or never."""
    sampling = Sampling(samples, batch_size, epochs, seed=1)
    for epoch in range(epochs):
        used: Counter[int] = Counter()
        for step in range(epoch * sampling.steps_per_epoch, (epoch + 1) * sampling.steps_per_epoch):
            count = workers[step % len(workers)]
            parts = [sampling.part(step, rank, count) for rank in range(count)]
            used.update(index for indexes, _ in parts for index in indexes)
            assert sum(weight for _, weight in parts) == pytest.approx(1.0)
        assert used == Counter(range(samples))


@pytest.mark.parametrize("name", ["samples", "batch_size", "epochs"])
def test_a_training_of_nothing_is_refused(name: str) -> None:
    """It has no last step whose checkpoint could end the job."""
    values = {"samples": 5, "batch_size": 2, "epochs": 1, "seed": 0} | {name: 0}
    with pytest.raises(InvalidInput, match=name):
        Sampling(values["samples"], values["batch_size"], values["epochs"], values["seed"])


SPEC = ModelSpec("torch.optim.sgd:SGD", ({"lr": 0.1},), (BlockSpec("w", 0, "float32", (2,), 8),), 10, 2, 5, 20, 0)


def written(root: Path, step: int) -> Path:
    folder = checkpoint.partial_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "ps-0.safetensors").write_bytes(b"shard")
    shard = checkpoint.ShardFile("ps-0.safetensors", checkpoint.sha256_of(folder / "ps-0.safetensors"), 5)
    return checkpoint.complete(root, step, SPEC, [shard])


def test_the_newest_two_checkpoints_stay_and_the_newest_valid_one_is_used(tmp_path: Path) -> None:
    """One could be damaged; three would fill the disk of a large model."""
    assert checkpoint.newest(tmp_path) == (None, [])
    for step in (5, 10, 15):
        written(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]
    found, problems = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.model, problems) == (15, SPEC, [])

    manifest = tmp_path / "step-00000015" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 15', '"step": 16'))
    found, problems = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 10
    assert len(problems) == 1
    assert "does not match its digest" in problems[0]

    (tmp_path / "step-00000010" / "ps-0.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="no checkpoint of this job is valid"):
        checkpoint.newest(tmp_path)


def test_a_damaged_newer_checkpoint_does_not_push_out_the_valid_ones(tmp_path: Path) -> None:
    """An attempt that resumed behind it would have one spare less, or none, just when a disk has shown to be bad."""
    for step in (5, 10, 90):
        written(tmp_path, step)
    for step in (15, 20):
        checkpoint.partial_folder(tmp_path, step - 1).mkdir()  # Never completed.
        written(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020", "step-00000090"]


def test_a_checkpoint_that_was_not_completed_is_never_used(tmp_path: Path) -> None:
    """The machine may have died while it was written."""
    checkpoint.partial_folder(tmp_path, 7).mkdir(parents=True)
    assert checkpoint.newest(tmp_path) == (None, [])
    checkpoint.discard_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_coordinator_does_without_torch() -> None:
    """Each job runs one, and torch would cost it seconds and hundreds of megabytes."""
    code = "import sys, fedsched.elastic.coordinator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_a_server_has_loaded_all_that_it_needs_before_it_says_that_it_is_there() -> None:
    """What the first optimiser loads takes longer than torch itself; all workers would wait for it at the switch."""
    code = """
import sys, torch
from fedsched.elastic import optimizers, server
loaded = set(sys.modules)
optimizer = optimizers.build("torch.optim.adam:Adam", ({"lr": 0.1},), [[torch.nn.Parameter(torch.ones(2))]])
optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
optimizer.step()
optimizer.zero_grad()
assert len(set(sys.modules) - loaded) < 20, sorted(set(sys.modules) - loaded)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_task_of_ours_that_loses_a_thread_ends_instead_of_keeping_its_job_waiting() -> None:
    """Alive and deaf, it would hold a cluster's machines until somebody looks."""
    code = """
import threading
from fedsched.elastic import checkpoint, ending
def main():
    threading.Thread(target=checkpoint.partial_folder, args=(None, 1)).start()
    threading.Event().wait(60)
    return 0
ending.run(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=50, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "TypeError" in ended.stderr


def test_the_short_example_learns_to_read_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the first thing that a new user runs."""
    from fedsched.examples import digits_mlp

    monkeypatch.setenv("EPOCHS", "6")
    digits_mlp.main()
    accuracy = float(capsys.readouterr().out.split()[2])
    assert accuracy > 0.9
