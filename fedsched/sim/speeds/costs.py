"""What the scaling verbs cost: how long a job makes no progress while it starts, is resized, or stops.

Three presets:

* `free`: nothing, as in DL2's reference simulator;
* `hot`: parameters move while training goes on, and a resize pauses it for tens of milliseconds (DL2, section 5);
* `restart`: a resize saves a checkpoint, stops, starts and loads it again: half a minute for a small model, and more
  with its size (public elastic schedulers charge 15 to 250 s, mostly around 30 s; Tiresias measured 62 s on average).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedsched.config import Tree

LAUNCH_S = 15.0
"""Until processes run, have loaded their libraries and found each other."""
LEAVE_S = 5.0
"""Until processes are gone."""
STATE = 3.0
"""A checkpoint holds the optimiser's two moments beside the parameters."""
STORAGE_GIB_PER_S = 0.2
SWITCH_S = 0.03
"""The step of a hot resize that blocks training."""
NETWORK_GIB_PER_S = 10.0
"""What little of the parameters has changed owner when a hot resize blocks, and how fast it is checked."""

MODEL_GIB: dict[str, float] = {
    "resnet-50": 0.095,
    "vgg-16": 0.515,
    "resnext-110": 0.006,
    "inception-bn": 0.042,
    "seq2seq": 0.034,
    "cnn-text-classification": 0.022,
    "dssm": 0.006,
    "wlm": 0.018,
}
"""Parameters of DL2's job types in single precision, from the models' published sizes."""
MODEL_GIB_DEFAULT = 0.1


@dataclass(frozen=True, slots=True)
class VerbCosts:
    """Seconds that each verb takes for one job."""

    start_s: float = 0.0
    scale_s: float = 0.0
    stop_s: float = 0.0


class Costs:
    """Costs by job type.

    Args:
        preset: see the module.
        model_gib: size of a job type's parameters, where it is neither DL2's nor of the usual size.
        fixed: verbs that always cost the same, instead of what the preset says: any of `start_s`, `scale_s`, `stop_s`.
    """

    def __init__(
        self,
        preset: Literal["free", "hot", "restart"],
        model_gib: Mapping[str, float] | None = None,
        fixed: Mapping[str, float] | None = None,
    ) -> None:
        self._preset = preset
        self._model_gib = {**MODEL_GIB, **(model_gib or {})}
        self._fixed = fixed or {}
        self._known: dict[str, VerbCosts] = {}

    def of(self, job_type: str) -> VerbCosts:
        """What the verbs cost a job of this type."""
        if job_type not in self._known:
            start_s, scale_s, stop_s = self._by_preset(self._model_gib.get(job_type, MODEL_GIB_DEFAULT))
            fixed = self._fixed
            self._known[job_type] = VerbCosts(
                fixed.get("start_s", start_s), fixed.get("scale_s", scale_s), fixed.get("stop_s", stop_s)
            )
        return self._known[job_type]

    def _by_preset(self, model_gib: float) -> tuple[float, float, float]:
        if self._preset == "free":
            return 0.0, 0.0, 0.0
        checkpoint_s = STATE * model_gib / STORAGE_GIB_PER_S
        start_s, stop_s = LAUNCH_S + checkpoint_s, LEAVE_S + checkpoint_s
        if self._preset == "hot":
            return start_s, SWITCH_S + model_gib / NETWORK_GIB_PER_S, stop_s
        return start_s, stop_s + start_s, stop_s


Seconds = Annotated[float, Field(ge=0)]


class CostsConfig(Tree):
    """The `costs` section of an experiment."""

    preset: Literal["free", "hot", "restart"] = "hot"
    """Free; parameters move while training goes on; or stop, checkpoint and start again."""
    model_gib: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """Size of a job type's parameters, which costs grow with."""
    start_s: Seconds | None = None
    """Instead of what the preset says, for every job; likewise the next two."""
    scale_s: Seconds | None = None
    stop_s: Seconds | None = None

    def costs(self) -> Costs:
        """Costs by job type."""
        fixed = {"start_s": self.start_s, "scale_s": self.scale_s, "stop_s": self.stop_s}
        return Costs(
            self.preset, self.model_gib, {verb: seconds for verb, seconds in fixed.items() if seconds is not None}
        )
