"""The public traces that the package ships fitted parameters of, as they lie in the data folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedsched.sim.fitting import By
from fedsched.sim.traces.formats import read
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.record import Refusals, TraceJob


def read_all(path: Path, form: TraceFormat) -> list[TraceJob]:
    """The jobs of a file that has nothing to refuse."""
    refused = Refusals()
    jobs = list(read(path, form, refused))
    assert refused.total == 0, refused.kept[0]
    return jobs


def itp(data_dir: Path) -> list[TraceJob]:
    """The ten ITP clusters together."""
    files = sorted((data_dir / "elasticflow-itp").glob("cluster??.csv.gz"))
    return [
        msgspec.structs.replace(job, cluster=file.name.removesuffix(".csv.gz"))
        for file in files
        for job in read_all(file, TraceFormat.ITP)
    ]


def shipped_trace(name: str, data_dir: Path) -> tuple[list[TraceJob], str, By]:
    """The jobs behind shipped parameters, the source that they name, and what makes a cluster of them."""
    if name == "itp":
        return itp(data_dir), "microsoft/elasticflow-traces, ten clusters, 2021-03-04 to 2021-05-03", By.CLUSTER
    if name == "philly":
        jobs = read_all(data_dir / "philly" / "philly_jobs.csv.gz", TraceFormat.PHILLY)
        return jobs, "msr-fiddle/philly-traces as flattened for AdaptDL, 2017-09-04 to 2017-12-22", By.VC
    assert name == "helios-venus", f"add the trace behind {name} here"
    jobs = read_all(data_dir / "helios-venus-2vc" / "helios_venus_2vc_sept2020.csv", TraceFormat.HELIOS)
    return jobs, "S-Lab-System-Group/HeliosData, Venus, two virtual clusters, September 2020", By.VC
