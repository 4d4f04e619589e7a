"""The state of a training on line or in a federation, as what a file keeps and back."""

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
from fedsched.federation.loop import BaseVersion, Standing
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.runtime import codec
from fedsched.sim import training_state
from fedsched.sim.teaching import Recipe, Training
from fedsched.sim.training_state import Kept, under


def kept(training: Training) -> Kept:
    """All that the training goes on from."""
    state = training.state
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
    for cluster, weights in state.deciding.items():
        arrays.update({f"deciding.{cluster}/{name}": array for name, array in weights.arrays.items()})
    for index, best in enumerate(state.best_arrays):
        arrays.update({f"best.{index}/{name}": array for name, array in best.items()})
    rest = {
        "standings": standings,
        "clusters": list(state.learners),
        "deciding": list(state.deciding),
        "stories": {cluster: dict(weights.made) for cluster, weights in state.deciding.items()},
        "episodes": state.episodes,
        "slots": state.slots,
        # As pairs: the log's columns come in the order in which they were first told.
        "rows": [list(row.items()) for row in state.rows],
        "best": list(state.best.items()),
    }
    return Kept(_proven(training), arrays, rest)


def load(path: Path, recipe: Recipe) -> Training:
    """The training that goes on from the file.

    Raises:
        CorruptCheckpoint: the file or the first weights cannot be read or are damaged.
        InvalidInput: it is the state of another recipe; the first difference is named.
    """
    training = Training(recipe)
    there = training_state.load(path, _proven(training))
    with training_state.taken_apart():
        _restore(training, there)
    return training


def _restore(training: Training, there: Kept) -> None:
    state, rest, layers = training.state, there.rest, training.first.shape.layers()
    state.standings = [_standing(training, there.arrays, index, one) for index, one in enumerate(rest["standings"])]
    for cluster in rest["clusters"]:
        state.learners[ClusterName(cluster)].restore(under(there.arrays, f"learner.{cluster}/"))
    stories = rest.get("stories", {})  # states of earlier versions have none
    for cluster in rest.get("deciding", ()):
        weights = training_state.weights(there.arrays, f"deciding.{cluster}/", layers)
        state.deciding[ClusterName(cluster)] = training.first.replaced(weights, stories.get(cluster, {}))
    state.episodes, state.slots = rest["episodes"], rest["slots"]
    state.rows, state.best = [dict(row) for row in rest["rows"]], dict(rest["best"])
    if state.best:
        groups = range(len(state.standings))
        state.best_arrays = [training_state.weights(there.arrays, f"best.{index}/", layers) for index in groups]


def _proven(training: Training) -> dict[str, Any]:
    """The recipe with what its first weights are, wherever their file lies: it may have been written over since."""
    return {**training.recipe.plain(), "digest of the first weights": training.first.digest}


def _standing(training: Training, arrays: Mapping[str, NDArray[Any]], index: int, kept: Mapping[str, Any]) -> Standing:
    record = codec.loads(PolicyRecord, json.dumps(kept["record"]).encode())
    there = training_state.weights(arrays, f"weights.{index}/", training.first.shape.layers())
    weights = training.first.replaced(there, kept["made"])
    moments = arrays[f"optimiser.{index}"].tobytes()
    optimiser = ServerOptimiser.from_bytes(training.recipe.learning_rate, moments, hashlib.sha256(moments).hexdigest())
    version = BaseVersion(record, weights, weights.to_bytes(), optimiser)
    return Standing(version, kept["version_last"], kept["number_last"])
