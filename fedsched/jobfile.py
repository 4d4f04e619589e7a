"""Job files: short YAML, or the same fields under a kubectl-style envelope, to a job specification and back."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from fedsched import yamlfile
from fedsched.config import Name
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import EPOCHS_MAX, LENGTH_MAX_S, TASKS_MAX, JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.errors import InvalidJobFile
from fedsched.problems import problems
from fedsched.yamlfile import shown

API_VERSION = "fedsched.io/v1alpha1"
KIND = "ElasticJob"
EPOCHS_DEFAULT = 10.0
"""Assumed length of a job that says nothing about it."""
FILE_BYTES_MAX = 256 * 1024

UNSUPPORTED = {
    "image": "jobs run as processes of the cluster's nodes; prepare the environment there",
    "priorityClass": "give priority as a number from 0 to 100",
    "extends": "write the fields out",
    "onClusterLost": "a job waits for its cluster, which goes on with it",
    "elastic.workers.start": "the policy chooses between min and max",
    "elastic.ps.start": "the policy chooses between min and max",
    "checkpoint.dir": "checkpoints lie in the job's directory on its cluster",
    "placement.spillAfter": "a full cluster is passed over at once",
    "limits.minRuntime": "remove it",
    "limits.preemptible": "whether jobs are preempted is the cluster's configuration",
    "metadata.labels": "remove it",
}
"""Fields of the documented format that this version does not carry out, and what holds instead."""

CPUS_MAX = 100_000
GPUS_MAX = 1000

_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9}(?:\.\d+)?)s)?")
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(MB|MiB|GB|GiB|TB|TiB)\+?")
_OWN_VARIABLES = ("FEDSCHED_", "TRACEPARENT")
_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


def _duration(value: Any) -> float:
    """Seconds: a number, or parts like 1h30m."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError(f"{shown(value)} is not a duration; 90s, 10m, 1h30m or 2d was expected")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _cpus(value: Any) -> float:
    """A number of cores; `4+` says at least 4, which is what any request means."""
    try:
        return float(value.rstrip("+") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise ValueError(f"{shown(value)} is not a number of cores; 2, 0.5 or 4+ was expected") from None


def _memory(value: Any) -> int:
    """MiB; as everywhere in schedulers, a GB of a request is 1024 MiB."""
    match = _MEMORY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{shown(value)} is not an amount of memory; 512MB, 16GB or 16GB+ was expected")
    return max(1, math.ceil(float(match[1]) * _MIB[match[2][0]]))


def _range(value: Any) -> Any:
    """`1..4`, a single number, or {min, max}."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"min": value, "max": value}
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:\.\.\s*(-?\d{1,9})\s*)?", value)
        if match is None:
            raise ValueError(f"{shown(value)} is not a range; 4, 1..4 or {{min: 1, max: 4}} was expected")
        return {"min": int(match[1]), "max": int(match[2] or match[1])}
    return value


def _accelerators(value: Any) -> Any:
    """`V100`, [V100, T4] (best first), or {V100: 1, T4: 1}: type and GPUs of one task."""
    if isinstance(value, str):
        return {value: 1}
    if isinstance(value, list) and all(isinstance(kind, str) for kind in value):
        return dict.fromkeys(value, 1)
    return value


def _text(value: str) -> str:
    """What a process can be given as an argument or a variable."""
    if "\0" in value:
        raise ValueError("it holds a zero byte, and no process can be given one")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None
    return value


Text = Annotated[str, AfterValidator(_text)]
Duration = Annotated[float, BeforeValidator(_duration), Field(ge=0, le=LENGTH_MAX_S)]
PositiveDuration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=LENGTH_MAX_S)]
Cpus = Annotated[float, BeforeValidator(_cpus), Field(ge=0.001, le=CPUS_MAX)]
Memory = Annotated[int, BeforeValidator(_memory)]


class _Part(BaseModel):
    """A part of the job file. Fields are spelled as in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RangePart(_Part):
    """Fewest and most tasks of a role."""

    min: int = Field(ge=1, le=TASKS_MAX)
    max: int = Field(ge=1, le=TASKS_MAX)

    @model_validator(mode="after")
    def _is_ordered(self) -> RangePart:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; min must be at most max")
        return self


class PsRangePart(RangePart):
    """Fewest and most parameter servers; none at all means that workers reduce gradients among themselves."""

    min: int = Field(ge=0, le=TASKS_MAX)
    max: int = Field(ge=0, le=TASKS_MAX)

    @model_validator(mode="after")
    def _keeps_its_kind(self) -> PsRangePart:
        if self.min == 0 and self.max > 0:
            raise ValueError(f"0..{self.max} is not possible; a job has servers, 1..{self.max} say, or it has none: 0")
        return self


TaskRange = Annotated[RangePart, BeforeValidator(_range)]
PsRange = Annotated[PsRangePart, BeforeValidator(_range)]


class ResourcesPart(_Part):
    """What one worker needs."""

    cpus: Cpus = 1.0
    memory: Memory = 1024
    accelerators: Annotated[dict[str, int], BeforeValidator(_accelerators)] = {}

    @field_validator("accelerators")
    @classmethod
    def _counts_agree(cls, value: dict[str, int]) -> dict[str, int]:
        if any(count < 1 for count in value.values()):
            raise ValueError("a number of GPUs must be at least 1")
        if any(count > GPUS_MAX for count in value.values()):
            raise ValueError(f"a number of GPUs must be at most {GPUS_MAX}")
        if len(set(value.values())) > 1:
            raise ValueError("all accelerator types must have the same number of GPUs in this version")
        return value


class PsResourcesPart(_Part):
    """What one parameter server needs."""

    cpus: Cpus = 1.0
    memory: Memory = 512


class ElasticPart(_Part):
    """How the job may be scaled."""

    ps: PsRange = PsRangePart(min=1, max=1)
    workers: TaskRange = RangePart(min=1, max=1)
    resize: str = "live"
    cooldown: Duration = 0.0

    @field_validator("resize")
    @classmethod
    def _is_live(cls, value: str) -> str:
        if value == "restart":
            raise ValueError("restart is not supported by this version; running jobs are resized live")
        if value != "live":
            raise ValueError(f"{shown(value)} is not known; live was expected")
        return value


class CheckpointPart(_Part):
    """How often progress is saved."""

    every: PositiveDuration = 10.0


class PlacementPart(_Part):
    """Which clusters will do."""

    ordered: tuple[Name, ...] = ()
    any_of: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _only_one(self) -> PlacementPart:
        if self.ordered and self.any_of:
            raise ValueError("ordered and any_of exclude each other; give one of them")
        return self


class LimitsPart(_Part):
    """When to give up."""

    maxRuntime: PositiveDuration | None = None
    maxAttempts: int = Field(default=3, ge=1, le=100)


class EstimatePart(_Part):
    """How long the job will be; the policy plans with it."""

    epochs: float = Field(default=EPOCHS_DEFAULT, gt=0, lt=EPOCHS_MAX)


class JobFile(_Part):
    """The short form."""

    name: Name = "job"
    queue: Name = "default"
    priority: int = Field(default=50, ge=0, le=100)
    type: Name = "unknown"
    run: Text = Field(min_length=1)
    env: dict[str, Text] = {}
    workdir: Text = ""
    resources: ResourcesPart = ResourcesPart()
    psResources: PsResourcesPart = PsResourcesPart()
    elastic: ElasticPart = ElasticPart()
    checkpoint: CheckpointPart = CheckpointPart()
    placement: PlacementPart = PlacementPart()
    limits: LimitsPart = LimitsPart()
    estimate: EstimatePart | None = None

    @field_validator("run")
    @classmethod
    def _can_be_split(cls, value: str) -> str:
        try:
            words = shlex.split(value)
        except ValueError as problem:
            raise ValueError(f"it cannot be read as a command: {str(problem).lower()}") from None
        if not words:
            raise ValueError("it is blank; a command was expected")
        return value

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_are_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        plain = {k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}
        for key in plain:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(key)):
                raise ValueError(f"{shown(key)} is not a name of an environment variable")
            if str(key).startswith(_OWN_VARIABLES):
                raise ValueError(f"{key} is set by fedsched itself; choose another name")
        return plain


def load(path: Path, *, name: str | None = None, command: Sequence[str] = (), user: str = "") -> JobSpec:
    """Read a job file.

    Args:
        name: takes the place of the file's name for the job.
        command: takes the place of `run`.
        user: who submits.

    Raises:
        InvalidJobFile: the file cannot be read or has problems; all of them are listed.
    """
    plain = yamlfile.read(path, InvalidJobFile, FILE_BYTES_MAX)
    given: dict[str, Any] = {}
    if name is not None:
        given["name"] = name
    if command:
        given["run"] = shlex.join(command)
    return parse(plain, path, given, user)


def parse(plain: Any, path: Path, given: dict[str, Any], user: str) -> JobSpec:
    """Check the contents of a job file; `given` takes the place of its fields, `path` names it.

    Raises:
        InvalidJobFile: there are problems; all of them are listed.
    """
    found: list[str] = []
    fields, prefix = _unwrapped(plain, found)
    unsupported = _take_unsupported(fields, found, prefix)
    default_name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:63].strip("-")
    fields = {"name": default_name or "job", **fields, **given}
    job: JobFile | None = None
    try:
        job = JobFile.model_validate(fields)
    except ValidationError as problem:
        found += [prefix + line for line in problems(JobFile, problem)]
    if job is None or found:
        raise InvalidJobFile(
            f"{path} has {len(found)} problem(s):\n" + "\n".join(f"  - {line}" for line in found),
            "remove what is not supported" if len(unsupported) == len(found) else "correct the lines above",
        )
    return _spec(job, path, user)


def long_form(spec: JobSpec) -> dict[str, Any]:
    """The specification under the envelope, complete, as `apply`-style tools want it."""
    body: dict[str, Any] = {
        "queue": spec.queue,
        "priority": spec.priority,
        "type": spec.job_type,
        "run": spec.run,
        "env": dict(spec.env),
        "workdir": spec.workdir,
        "resources": _resources(spec.worker_demand),
        "psResources": _resources(spec.ps_demand),
        "elastic": {
            "ps": {"min": spec.ps.minimum, "max": spec.ps.maximum},
            "workers": {"min": spec.workers.minimum, "max": spec.workers.maximum},
            "resize": "live",
            "cooldown": f"{spec.resize_cooldown_s:g}s",
        },
        "checkpoint": {"every": f"{spec.checkpoint_every_s:g}s"},
        "limits": {"maxAttempts": spec.max_attempts},
    }
    if "EPOCHS" in dict(spec.env):
        # Given without it, an estimate would set the variable, and the job would run with another environment.
        body["estimate"] = {"epochs": spec.epochs}
    if spec.accelerators:
        gpus = max(1, spec.worker_demand.gpu_milli // 1000)
        # A list where it can be one: tools that sort mappings would turn the preference round.
        body["resources"]["accelerators"] = (
            list(spec.accelerators) if gpus == 1 else dict.fromkeys(spec.accelerators, gpus)
        )
    if spec.clusters:
        body["placement"] = {"ordered" if spec.clusters_ranked else "any_of": list(spec.clusters)}
    if spec.max_runtime_s is not None:
        body["limits"]["maxRuntime"] = f"{spec.max_runtime_s:g}s"
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": spec.name}, "spec": body}


def _unwrapped(plain: Any, found: list[str]) -> tuple[dict[str, Any], str]:
    """The short form's fields, and what their paths begin with in the file."""
    if not isinstance(plain, dict):
        found.append(f"the file holds {_held(plain)}; fields such as `run: python train.py` were expected")
        return {"run": "true"}, ""
    if not {"apiVersion", "kind"} & {str(key) for key in plain}:
        return {str(key): value for key, value in plain.items()}, ""
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if plain.get(key) != expected:
            found.append(f"{key} is {shown(plain.get(key))}; {expected} was expected")
    known = ("apiVersion", "kind", "metadata", "spec", "status")
    for key in sorted(str(key) for key in plain if key not in known):
        near = difflib.get_close_matches(key, known, n=1)
        found.append(f"{key} is not a known field" + (f"; did you mean {near[0]}?" if near else ""))
    metadata, spec = plain.get("metadata") or {}, plain.get("spec")
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        found.append("metadata and spec must hold fields")
        return {"run": "true"}, "spec."
    for key in sorted(str(key) for key in metadata if key != "name"):
        found.append(
            f"metadata.{key} is not supported by this version; {UNSUPPORTED.get(f'metadata.{key}', 'remove it')}"
        )
    name = {"name": metadata["name"]} if "name" in metadata else {}
    return {**name, **{str(key): value for key, value in spec.items()}}, "spec."


def _held(plain: Any) -> str:
    return "nothing" if plain is None else "a list" if isinstance(plain, list) else f"only {shown(plain)}"


def _take_unsupported(fields: dict[str, Any], found: list[str], prefix: str) -> list[str]:
    """Remove fields that are documented but not carried out, with a problem for each; returns their paths."""
    taken = []
    for path, instead in UNSUPPORTED.items():
        *parents, last = path.split(".")
        part: Any = fields
        for parent in parents:
            if isinstance(part, dict) and isinstance(part.get(parent), dict):
                # A copy at each level: the caller's data stays as it is.
                part[parent] = dict(part[parent])
                part = part[parent]
            else:
                part = None
                break
        if isinstance(part, dict) and last in part:
            del part[last]
            taken.append(path)
            found.append(f"{prefix}{path} is not supported by this version; {instead}")
    return taken


def _spec(job: JobFile, path: Path, user: str) -> JobSpec:
    env = dict(job.env)
    epochs = job.estimate.epochs if job.estimate is not None else _epochs_of(env)
    if job.estimate is not None:
        env.setdefault("EPOCHS", f"{int(epochs)}" if epochs == int(epochs) else f"{epochs}")
    gpus = next(iter(job.resources.accelerators.values()), 0)
    base = path.absolute().parent
    return JobSpec(
        job_id=JobId(""),
        name=job.name,
        run=job.run,
        workers=Range(job.elastic.workers.min, job.elastic.workers.max),
        ps=Range(job.elastic.ps.min, job.elastic.ps.max),
        worker_demand=Resources(round(job.resources.cpus * 1000), job.resources.memory, gpus * 1000),
        ps_demand=Resources(round(job.psResources.cpus * 1000), job.psResources.memory),
        epochs=epochs,
        job_type=job.type,
        queue=job.queue,
        user=user,
        priority=job.priority,
        workdir=str(base / os.path.expanduser(job.workdir)) if job.workdir else str(base),
        env=tuple(sorted(env.items())),
        accelerators=tuple(job.resources.accelerators),
        clusters=tuple(ClusterName(name) for name in job.placement.ordered or job.placement.any_of),
        clusters_ranked=bool(job.placement.ordered) or not job.placement.any_of,
        max_attempts=job.limits.maxAttempts,
        max_runtime_s=job.limits.maxRuntime,
        checkpoint_every_s=job.checkpoint.every,
        resize_cooldown_s=job.elastic.cooldown,
    )


def _epochs_of(env: dict[str, str]) -> float:
    """The length that the script is told, if it is told one."""
    try:
        epochs = float(env.get("EPOCHS", ""))
    except ValueError:
        return EPOCHS_DEFAULT
    return epochs if 0 < epochs < EPOCHS_MAX else EPOCHS_DEFAULT


def _resources(amount: Resources) -> dict[str, Any]:
    return {"cpus": amount.cpu_milli / 1000, "memory": f"{amount.memory_mib}MiB"}
