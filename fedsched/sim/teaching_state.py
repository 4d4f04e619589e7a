"""The state of a training as one file, whole or absent, that proves what it is and says which recipe it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.core.ids import ClusterName
from fedsched.core.rounds import PolicyRecord
from fedsched.errors import CorruptCheckpoint, InvalidInput
from fedsched.federation.loop import Version
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.files import write_whole
from fedsched.policy import checkpoint
from fedsched.runtime import codec
from fedsched.sim.federation import Standing
from fedsched.sim.teaching import Recipe, State, Training

FORMAT = "fedsched/training/2"
HINT = "begin anew with --restart, or restore the file from a backup"


def save(path: Path, recipe: Recipe, state: State) -> None:
    """Write the state so that a crash of the process or the machine leaves the old file or the new one."""
    write_whole(path, to_bytes(recipe, state), durable=True)


def to_bytes(recipe: Recipe, state: State) -> bytes:
    """The file's contents; the same state always gives the same bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    standings = []
    for index, standing in enumerate(state.standings):
        active = standing.active
        arrays.update({f"weights.{index}/{name}": array for name, array in active.checkpoint.arrays.items()})
        arrays[f"optimiser.{index}"] = np.frombuffer(active.optimiser.to_bytes(), np.uint8)
        standings.append(
            {
                "record": json.loads(codec.dumps(active.record)),
                "made": dict(active.checkpoint.made),
                "version_last": standing.version_last,
                "number_last": standing.number_last,
            }
        )
    for cluster, learner in state.learners.items():
        arrays.update({f"learner.{cluster}/{name}": array for name, array in learner.state().items()})
    for index, best in enumerate(state.best_arrays):
        arrays.update({f"best.{index}/{name}": array for name, array in best.items()})
    card = {
        "format": FORMAT,
        "recipe": recipe.plain(),
        "standings": standings,
        "clusters": list(state.learners),
        "episodes": state.episodes,
        "slots": state.slots,
        # As pairs: the log's columns come in the order in which they were first told.
        "rows": [list(row.items()) for row in state.rows],
        "best": list(state.best.items()),
        "digest": checkpoint.digest(arrays),
    }
    return checkpoint.seal(arrays, card)


def load(path: Path, recipe: Recipe) -> Training:
    """The training that goes on from the file.

    Raises:
        CorruptCheckpoint: the file cannot be read or is damaged.
        InvalidInput: it is the state of another recipe; the first difference is named.
    """
    data = checkpoint.contents(path, "the training's state", HINT)
    try:
        arrays, card = checkpoint.unsealed(data)
        if card["format"] != FORMAT:
            raise ValueError(f"it is of format {card['format']}; {FORMAT} was expected")
        found = checkpoint.digest(arrays)
        if found != card["digest"]:
            raise ValueError(f"its arrays have digest {found[:12]}; {card['digest'][:12]} was expected")
    except checkpoint.MALFORMED as problem:
        raise CorruptCheckpoint(f"{path} is no whole state of a training: {problem}", HINT) from problem
    _same(path, card["recipe"], recipe.plain())
    training = Training(recipe)
    state = training.state
    state.standings = [_standing(training, arrays, index, kept) for index, kept in enumerate(card["standings"])]
    for cluster in card["clusters"]:
        state.learners[ClusterName(cluster)].restore(_under(arrays, f"learner.{cluster}/"))
    state.episodes, state.slots = card["episodes"], card["slots"]
    state.rows, state.best = [dict(row) for row in card["rows"]], dict(card["best"])
    state.best_arrays = [
        weights for index in range(len(state.standings)) if (weights := _under(arrays, f"best.{index}/"))
    ]
    return training


def _standing(training: Training, arrays: Mapping[str, NDArray[Any]], index: int, kept: Mapping[str, Any]) -> Standing:
    record = codec.loads(PolicyRecord, json.dumps(kept["record"]).encode())
    weights = training.first.replaced(_under(arrays, f"weights.{index}/"), kept["made"])
    moments = arrays[f"optimiser.{index}"].tobytes()
    optimiser = ServerOptimiser.from_bytes(training.recipe.learning_rate, moments, hashlib.sha256(moments).hexdigest())
    version = Version(record, weights, weights.to_bytes(), optimiser)
    return Standing(version, kept["version_last"], kept["number_last"])


def _under(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    here = json.loads(json.dumps(here))
    for name in [*there, *(name for name in here if name not in there)]:
        if there.get(name) != here.get(name):
            what = (
                "the experiment's files have changed since"
                if name == "experiment"
                else f"{name} is {here.get(name)!r} now and was {there.get(name)!r}"
            )
            raise InvalidInput(
                f"{path} is the state of another training: {what}", "use the same options, or begin anew with --restart"
            )
