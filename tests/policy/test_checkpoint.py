"""Checkpoint files: whole or refused, with one clear error."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from fedsched.cli.train_supervised import CLUSTERS, supervised
from fedsched.config import PolicyConfig
from fedsched.errors import CorruptCheckpoint
from fedsched.policy import checkpoint, registry
from fedsched.policy import set as set_policy
from fedsched.policy.checkpoint import Checkpoint, from_bytes, load
from fedsched.policy.dl2 import Dl2Shape, initial

SHAPE = Dl2Shape(window=2, hidden=(4,))
GOOD = Checkpoint(initial(SHAPE, 0), SHAPE, {"command": "made here", "seed": 0, "loss": 0.5})
DATA = GOOD.to_bytes()
SET_SHAPE = set_policy.SetShape(width=8, rows=4)
GOOD_SET = Checkpoint(set_policy.initial(SET_SHAPE, 0), SET_SHAPE, {"seed": 0})


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    GOOD.save(path)
    back = load(path)
    assert (back.shape, back.made, back.digest) == (GOOD.shape, GOOD.made, GOOD.digest)
    assert back.to_bytes() == DATA == path.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@settings(max_examples=150)
@given(position=st.integers(0, len(DATA) - 1), flip=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
def test_a_flipped_bit_anywhere_is_noticed(position: int, flip: int) -> None:
    """A cluster that decides with damaged weights would look healthy and be wrong."""
    damaged = bytearray(DATA)
    damaged[position] ^= flip
    with pytest.raises(CorruptCheckpoint) as problem:
        from_bytes(bytes(damaged))
    assert problem.value.hint


@pytest.mark.parametrize("length", [0, 4, 8, 200, len(DATA) // 2, len(DATA) - 1])
def test_a_truncated_file_is_noticed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(DATA[:length])
    with pytest.raises(CorruptCheckpoint, match=r"cut\.safetensors is no whole checkpoint.*expected a safetensors"):
        load(path)


def test_weights_that_do_not_match_their_schema_are_refused() -> None:
    """Sealed properly by somebody's tool and still not usable."""
    arrays = initial(SHAPE, 0)
    wrong_shape = Checkpoint({**arrays, "policy.0.bias": np.zeros(5, dtype=np.float32)}, SHAPE, {})
    not_finite = Checkpoint({**arrays, "policy.0.bias": np.full(4, np.nan, dtype=np.float32)}, SHAPE, {})
    with pytest.raises(CorruptCheckpoint, match=r"policy\.0\.bias has shape \(5,\); expected \(4,\)"):
        from_bytes(wrong_shape.to_bytes())
    with pytest.raises(CorruptCheckpoint, match="not finite"):
        from_bytes(not_finite.to_bytes())


@pytest.mark.parametrize("good", [GOOD, GOOD_SET], ids=["dl2", "set"])
@pytest.mark.parametrize("value", [None, "x", -1, [], {}, [math.inf], math.inf, math.nan, 1e300], ids=repr)
def test_a_description_with_anything_else_in_it_is_refused(good: Checkpoint, value: object) -> None:
    """JSON holds what no number of ours is; the agent that looks for a new version must outlive it."""
    arrays, card = checkpoint.unsealed(good.to_bytes())
    for name in sorted(set(card) - {"made"}):
        with pytest.raises(CorruptCheckpoint):
            from_bytes(checkpoint.seal(arrays, {**card, name: value}))


def test_files_of_others_and_missing_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="no whole checkpoint"):
        from_bytes(save_tensors({"weight": np.zeros(3, dtype=np.float32)}))
    with pytest.raises(CorruptCheckpoint, match="No such file"):
        load(tmp_path / "nowhere.safetensors")


def test_the_shipped_weights_say_how_to_make_them() -> None:
    """Nobody has to trust a binary: the command with its defaults is in the file."""
    shipped = load(checkpoint.BUILTIN)
    assert shipped.shape == Dl2Shape()
    assert shipped.arrays["policy.0.weight"].dtype == np.float32
    defaults = {name: entry.default for name, entry in inspect.signature(supervised).parameters.items()}
    assert shipped.made["command"] == (
        f"fedsched train supervised --teacher {defaults['teacher'].value} --seed {defaults['seed']} "
        f"--steps {defaults['steps']} --scenarios {CLUSTERS} --held-out {defaults['held_out']} FILE"
    )


def test_weights_of_the_set_policy_come_back_too_and_are_verified_alike(tmp_path: Path) -> None:
    """Both learned policies share one format, one digest and one server."""
    path = tmp_path / "set.safetensors"
    GOOD_SET.save(path)
    back = load(path)
    assert (back.shape, back.made, back.digest) == (SET_SHAPE, GOOD_SET.made, GOOD_SET.digest)
    short = Checkpoint({**GOOD_SET.arrays, "policy.ps.bias": np.zeros(5, dtype=np.float32)}, SET_SHAPE, {})
    with pytest.raises(CorruptCheckpoint, match=r"policy\.ps\.bias has shape \(5,\)"):
        from_bytes(short.to_bytes())


@pytest.mark.parametrize(("policy", "others"), [("dl2", checkpoint.BUILTIN_SET), ("set", checkpoint.BUILTIN)])
def test_weights_of_another_policy_are_refused(policy: str, others: Path) -> None:
    """A path mixed up in a configuration must not start an agent that cannot decide."""
    config = PolicyConfig.model_validate({"name": policy, "checkpoint": str(others)})
    with pytest.raises(CorruptCheckpoint, match=f"policy {policy} expected fedsched/{policy}/1"):
        registry.make(config)


def test_the_set_policys_shipped_weights_say_how_they_were_made() -> None:
    """Nobody has to trust a binary."""
    shipped = load(checkpoint.BUILTIN_SET)
    assert shipped.shape == set_policy.SetShape()
    assert str(shipped.made["command"]).startswith("fedsched train set ")
    assert {"seed", "slots", "cpu_s", "validation_jct_slots"} <= set(shipped.made)
    assert checkpoint.BUILTIN_SET.stat().st_size < 1_000_000
