"""Keeps a job's checkpoints: complete or absent, verified before use, the newest two on disk.

Servers write their shards into `step-<n>.partial`; when all are there the coordinator adds the manifest and renames the
folder to `step-<n>`. Needs no torch: the coordinator does not load what it checks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedsched.elastic.model import ModelSpec
from fedsched.errors import CorruptCheckpoint
from fedsched.files import sync_folder, write_whole
from fedsched.pb import training_pb2 as pb

KEPT = 2
"""How many checkpoints of a job stay on disk."""
_FORMAT = 1
"""Grows when a manifest is written otherwise; one of another format is not read."""

_RESTORE = "restore that folder from a backup, or remove it: the job goes on from the one before"


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One server's part of a checkpoint."""

    file: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint."""

    step: int
    folder: Path
    model: ModelSpec
    shards: tuple[ShardFile, ...]

    @property
    def files(self) -> list[Path]:
        """The shards' files."""
        return [self.folder / shard.file for shard in self.shards]


def partial_folder(root: Path, step: int) -> Path:
    """Where the shards of a checkpoint gather before it is complete."""
    return root / f"step-{step:08d}.partial"


def complete(root: Path, step: int, model: ModelSpec, shards: Sequence[ShardFile]) -> Path:
    """Turn the gathered shards into a checkpoint, then drop those that are too old; return its folder."""
    partial = partial_folder(root, step)
    body = {
        "format": _FORMAT,
        "step": step,
        "model": json.loads(model.dumps()),
        "shards": [asdict(shard) for shard in shards],
    }
    manifest = {**body, "sha256": _digest_of(body)}
    write_whole(partial / "manifest.json", json.dumps(manifest, indent=1).encode(), durable=True)
    folder = root / f"step-{step:08d}"
    if folder.exists():  # Left by an attempt whose checkpoint turned out corrupt.
        shutil.rmtree(folder)
    partial.rename(folder)
    sync_folder(root)
    # Newer ones were passed over as damaged when this attempt started: they must not push out valid ones.
    for old in [found for found in _folders(root) if _step_of(found) <= step][KEPT:]:
        shutil.rmtree(old)
    # A server could not write its shard of an earlier one; what the others wrote would stay for ever.
    for found in root.glob("step-*.partial"):
        if _step_of(found) < step:
            shutil.rmtree(found, ignore_errors=True)
    return folder


def write_shard(root: Path, step: int, task: str, write: Callable[[Path], None]) -> pb.ShardWritten:
    """Have a task's part of a checkpoint written to disk and say what became of it."""
    folder = partial_folder(root, step)
    path = folder / f"{task}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return pb.ShardWritten(step=step, file=path.name, sha256=sha256_of(path), size_bytes=path.stat().st_size)
    except Exception as problem:  # A full disk comes as whatever the writer makes of it.
        return pb.ShardWritten(step=step, error=f"{task} could not write {path}: {problem}")


def discard_partial(root: Path) -> None:
    """Remove what an earlier attempt did not complete."""
    for folder in root.glob("step-*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, or none where there is none yet, and what is wrong with those passed over.

    Raises:
        CorruptCheckpoint: there are checkpoints, and none is valid.
    """
    problems: list[str] = []
    for folder in _folders(root):
        try:
            return verified(folder), problems
        except CorruptCheckpoint as problem:
            problems.append(problem.message)
    if problems:
        raise CorruptCheckpoint(
            "no checkpoint of this job is valid:\n" + "\n".join(f"  - {line}" for line in problems),
            f"restore one from a backup, or remove {root} to train from the start",
        )
    return None, problems


def sha256_of(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folders(root: Path) -> list[Path]:
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").removesuffix(".partial"))


def verified(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, every byte of it checked against its digests.

    Raises:
        CorruptCheckpoint: something in it is not what was written.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        claimed = manifest.pop("sha256")
        if manifest["format"] != _FORMAT or claimed != _digest_of(manifest):
            raise CorruptCheckpoint(f"{folder}: the manifest does not match its digest", _RESTORE)
        checkpoint = Checkpoint(
            manifest["step"],
            folder,
            ModelSpec.loads(json.dumps(manifest["model"])),
            tuple(ShardFile(**shard) for shard in manifest["shards"]),
        )
        for shard in checkpoint.shards:
            if sha256_of(folder / shard.file) != shard.sha256:
                raise CorruptCheckpoint(f"{folder}: {shard.file} does not match its digest", _RESTORE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CorruptCheckpoint(f"{folder} cannot be read: {problem}", _RESTORE) from problem
    return checkpoint


def _digest_of(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
