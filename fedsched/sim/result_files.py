"""Writes the rows of simulated runs to files: CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsched.errors import InvalidInput
from fedsched.files import whole
from fedsched.sim.results import PHASES, SPENT, RunResult

COLUMNS = (
    "job_id",
    "policy",
    "seed",
    "training_seed",
    "cluster",
    "phase",
    "submit_s",
    "start_s",
    "finish_s",
    "jct_s",
    *SPENT,
    "gpu_s",
    "core_s",
    "resizes",
    "preemptions",
    "attempts",
)


def _columns(run: RunResult) -> dict[str, Sequence[Any]]:
    """A run's rows by the names in `COLUMNS`."""
    jobs, count = run.jobs, len(run.jobs)
    times_s = {
        name: [None if math.isnan(value) else value for value in values.tolist()]
        for name, values in (("start_s", jobs.start_s), ("finish_s", jobs.finish_s), ("jct_s", jobs.jct_s))
    }
    return {
        "job_id": jobs.job_id,
        "policy": [run.policy] * count,
        "seed": [run.seed] * count,
        "training_seed": [run.training_seed] * count,
        "cluster": jobs.cluster,
        "phase": [PHASES[code].value for code in jobs.phase.tolist()],
        "submit_s": jobs.submit_s.tolist(),
        **times_s,
        **{name: jobs.spent_s[:, index].tolist() for index, name in enumerate(SPENT)},
        "gpu_s": jobs.gpu_s.tolist(),
        "core_s": jobs.core_s.tolist(),
        "resizes": jobs.resizes.tolist(),
        "preemptions": jobs.preemptions.tolist(),
        "attempts": jobs.attempts.tolist(),
    }


def write_csv(path: Path, runs: Sequence[RunResult]) -> None:
    """A line per job of every run; empty where something did not happen. Numbers are exact.

    Raises:
        OSError: it could not be written.
    """
    with whole(path) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as text:
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(COLUMNS)
        for run in runs:
            columns = _columns(run)
            lines.writerows(zip(*(columns[name] for name in COLUMNS), strict=True))


def write_parquet(path: Path, runs: Sequence[RunResult]) -> None:
    """The same as a Parquet table; the figures of each run are JSON in the file's metadata, under `fedsched.runs`.

    Left out is the CPU time that a run took, so that the same runs are the same bytes.

    Raises:
        InvalidInput: pyarrow is not installed.
        OSError: it could not be written.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as problem:
        missing = "Parquet files need pyarrow, which is not installed"
        raise InvalidInput(missing, "pip install 'fedsched[sim]'") from problem
    kinds = {
        **dict.fromkeys(COLUMNS, pa.float64()),
        **dict.fromkeys(("seed", "training_seed", "resizes", "preemptions", "attempts"), pa.int64()),
        **dict.fromkeys(("job_id", "policy", "cluster", "phase"), pa.string()),
    }
    figures = [{name: value for name, value in run.plain().items() if name != "cpu_s"} for run in runs]
    told = json.dumps(figures).encode()
    schema = pa.schema([(name, kinds[name]) for name in COLUMNS], metadata={"fedsched.runs": told})
    tables = (pa.table(_columns(run), schema=schema) for run in runs)
    with whole(path) as raw, parquet.ParquetWriter(raw, schema) as writer:
        for table in tables:
            writer.write_table(table)
