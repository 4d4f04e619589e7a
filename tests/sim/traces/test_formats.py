"""Importers: every public file whole, every published layout, and no row that is left out or made up in silence."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.errors import InvalidTrace, NotFound
from fedsched.sim.traces.formats import read
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.record import Refusals, SkipReason, TraceJob
from tests.sim.traces.public import itp, read_all

ROWS = {
    "elasticflow-itp/federated_week_d30_d37.csv": (TraceFormat.ITP, 6553),
    "elasticflow-itp/195job.csv.gz": (TraceFormat.ITP, 195),
    "elasticflow-profiles/philly_103959.csv": (TraceFormat.ITP, 876),
    "philly/philly_jobs.csv.gz": (TraceFormat.PHILLY, 82_247),
    "philly/philly_week.csv": (TraceFormat.PHILLY, 14_724),
    "helios-venus-2vc/helios_venus_2vc_sept2020.csv": (TraceFormat.HELIOS, 1_867),
    "gavel/traces_physical_cluster/artifact_evaluation.trace": (TraceFormat.GAVEL, 15),
    "gavel/traces_physical_cluster/debug.trace": (TraceFormat.GAVEL, 14),
    "gavel/traces_physical_cluster/debug_v2.trace": (TraceFormat.GAVEL, 14),
    "gavel/traces_physical_cluster/highmem_test.trace": (TraceFormat.GAVEL, 8),
    "gavel/traces_physical_cluster/max_min_fairness.trace": (TraceFormat.GAVEL, 96),
    "gavel/traces_physical_cluster/medium_test.trace": (TraceFormat.GAVEL, 20),
    "gavel/traces_physical_cluster/minimize_makespan.trace": (TraceFormat.GAVEL, 100),
    "gavel/traces_physical_cluster/small_test.trace": (TraceFormat.GAVEL, 20),
    "shockwave/traces/120_0.2_5_100_40_25_0-0.5-0.5_0.6-0.3-0.09-0.01.trace.gz": (TraceFormat.GAVEL, 120),
    "shockwave/traces/220_0.2_5_100_25_4_0-0.5-0.5_0.6-0.3-0.09-0.01.trace.gz": (TraceFormat.GAVEL, 220),
    "shockwave/traces/460_0.2_5_100_10_1_0-0.5-0.5_0.6-0.3-0.09-0.01.trace.gz": (TraceFormat.GAVEL, 460),
    "shockwave/traces/900_0.2_5_1000_5_15_0-0.5-0.5_0.6-0.3-0.09-0.01.trace.gz": (TraceFormat.GAVEL, 900),
    "shockwave/traces/900_0.2_5_100_5_15_0-0.5-0.5_0.6-0.3-0.09-0.01.trace.gz": (TraceFormat.GAVEL, 900),
    "tiresias/60_job.csv": (TraceFormat.TIRESIAS, 60),
    "muri/cluster_trace_400.csv": (TraceFormat.TIRESIAS, 400),
    "muri/trace1.csv.gz": (TraceFormat.TIRESIAS, 1_494),
    "muri/trace2.csv.gz": (TraceFormat.TIRESIAS, 5_755),
    "muri/trace3.csv.gz": (TraceFormat.TIRESIAS, 992),
    "muri/trace4.csv.gz": (TraceFormat.TIRESIAS, 2_638),
}


def imported(path: Path, form: TraceFormat) -> tuple[list[TraceJob], Refusals]:
    refused = Refusals()
    return list(read(path, form, refused)), refused


def given_file(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_job_of_every_public_file_is_imported(name: str, data_dir: Path) -> None:
    """A comparison with other people's results is void if some of their jobs are missing from ours."""
    form, count = ROWS[name]

    assert len(read_all(data_dir / name, form)) == count


def test_the_ten_itp_clusters_have_the_published_jobs_and_gpu_hours(data_dir: Path) -> None:
    """The publisher states both: a wrong unit or column would show in the second."""
    jobs = itp(data_dir)

    assert len(jobs) == 69_351
    assert sum(job.duration_s * job.num_gpu for job in jobs) / 3600 == pytest.approx(1_632_719.7, abs=0.1)


def test_golden_traces_are_plain_csv(golden_dir: Path) -> None:
    """Equality with Tiresias starts from its 2,396 jobs on ITP's sixth cluster."""
    jobs = read_all(golden_dir / "tiresias" / "trace_itp06.csv.gz", TraceFormat.CSV)

    assert len(jobs) == 2_396
    assert (jobs[0].submit_s, jobs[0].num_gpu, jobs[0].duration_s) == (0, 4, 3890)
    assert len(read_all(golden_dir / "tiresias" / "trace_60job.csv", TraceFormat.TIRESIAS)) == 60


@pytest.mark.parametrize("name", ["openb_pod_list_default.csv.gz", "openb_pod_list_gpuspec33.csv.gz"])
def test_alibabas_pods_without_gpu_or_run_are_refused_and_the_others_keep_their_shares(
    name: str, data_dir: Path
) -> None:
    """Of 8,152 pods 1,088 want no GPU and 861 more never ran; a simulation of all 8,152 would be another trace."""
    jobs, refused = imported(data_dir / "alibaba-openb-2023" / name, TraceFormat.ALIBABA)

    assert len(jobs) == 6_203
    assert refused.counts == {SkipReason.NO_GPUS: 1_088, SkipReason.NEVER_RAN: 861}
    assert refused.first_malformed is None
    second = jobs[1]
    assert (second.num_gpu, second.duration_s, second.cpus, second.memory_gib) == (0.46, 12_475_899, 6, 12)
    assert any(job.accelerators for job in jobs) == ("gpuspec" in name)


def test_a_list_of_pods_without_times_is_no_trace(data_dir: Path) -> None:
    """Made-up times would look like a result."""
    with pytest.raises(InvalidTrace, match="no column creation_time"):
        imported(data_dir / "alibaba-openb-2023" / "openb_pod_list_multigpu50.csv.gz", TraceFormat.ALIBABA)


def test_gavels_jobs_that_were_never_measured_are_refused_and_named(data_dir: Path) -> None:
    """Gavel's own Philly traces hold jobs that its tables have no speed for; nobody knows how long they last."""
    jobs, refused = imported(data_dir / "gavel" / "traces_msr_seed0" / "2869ce.csv.gz", TraceFormat.GAVEL)

    assert (len(jobs), refused.counts) == (354, {SkipReason.NO_THROUGHPUT: 179})
    assert str(refused.kept[0]).endswith(
        ":3: job_type is 'Recommendation (batch size 8192)'; it was never measured on 4 x v100"
    )


def test_gavels_steps_become_seconds_by_its_own_table_or_by_the_normalised_one(data_dir: Path) -> None:
    """Both hold the same measurements; a user has whichever was fetched."""
    folder = data_dir / "gavel"
    trace = folder / "traces_physical_cluster" / "max_min_fairness.trace"
    ours = list(read(trace, TraceFormat.GAVEL, Refusals()))

    original = list(read(trace, TraceFormat.GAVEL, Refusals(), throughputs=folder / "simulation_throughputs.json.gz"))
    slower = list(read(trace, TraceFormat.GAVEL, Refusals(), worker_type="k80"))

    assert original == ours
    assert sum(job.duration_s for job in slower) > 2 * sum(job.duration_s for job in ours)
    assert (ours[0].model, ours[0].batch_size, ours[0].num_gpu) == ("ResNet-18 (batch size 128)", 128, 4)


def test_the_published_itp_layouts_are_read(tmp_path: Path) -> None:
    """The publisher's two archives name columns differently from everybody's tables."""
    raw = given_file(tmp_path, "job_id,submission_time,duration,num_gpu\n6b2d9ccc-62,16566,3890,4\n", "raw.csv")
    drawn = given_file(
        tmp_path,
        "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
        "6b2d9ccc-62,16566,40285,bert,21347,64,4,3890\n",
    )

    assert read_all(raw, TraceFormat.ITP) == [TraceJob("6b2d9ccc-62", 16566, 3890, 4)]
    assert read_all(drawn, TraceFormat.ITP) == [
        TraceJob("6b2d9ccc-62", 16566, 3890, 4, model="bert", batch_size=64, deadline_s=21347)
    ]


HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"


def test_the_published_helios_log_counts_from_its_earliest_submission(tmp_path: Path) -> None:
    """Its rows are in order of ids, which is not that of submission in every cluster; no time may be negative."""
    path = given_file(
        tmp_path,
        HELIOS
        + "9,uA,vcX,8,64,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:30,2020-06-09 18:45:36,246,3\n"
        + "7,uB,vcY,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0\n"
        + "8,uB,vcY,0,1,1,COMPLETED,2020-06-09 18:50:01,2020-06-09 18:50:01,2020-06-10 04:55:09,36308,0\n"
        + "6,uB,vcY,1,1,1,COMPLETED,2020-06-09 18:50:01,2020-06-09 18:50:09,2020-06-09 18:50:02,1,0\n",
    )

    jobs, refused = imported(path, TraceFormat.HELIOS)

    assert jobs == [
        TraceJob("9", 26, 246, 8, vc="vcX", user="uA"),
        TraceJob("7", 0, 36848, 1, vc="vcY", user="uB"),
    ]
    assert refused.counts == {SkipReason.NO_GPUS: 1, SkipReason.END_BEFORE_START: 1}


def test_adaptdls_flattening_of_philly_is_read(tmp_path: Path) -> None:
    """It is the copy of Philly that most people have, being a thirtieth of the original."""
    path = given_file(
        tmp_path,
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-07 01:11:39,193256.0,8,1546048.0,ee9e8c\n",
    )

    assert read_all(path, TraceFormat.PHILLY) == [
        TraceJob("0", 193_816, 66, 1, vc="11cb48"),
        TraceJob("1", 0, 193_256, 8, vc="ee9e8c"),
    ]


def attempt(start: str | None, end: str | None, gpus: int = 8) -> dict[str, object]:
    return {"start_time": start, "end_time": end, "detail": [{"ip": "m1", "gpus": [f"gpu{n}" for n in range(gpus)]}]}


def entry(number: int, *attempts: dict[str, object], **others: object) -> dict[str, object]:
    return {
        "status": "Pass", "vc": "ee9e8c", "jobid": f"application_{number}", "attempts": list(attempts),
        "submitted_time": "2017-10-07 01:11:39", "user": "ce2f4c", **others,
    }  # fmt: skip


def test_a_job_of_the_philly_log_ran_as_long_as_its_attempts_together(tmp_path: Path) -> None:
    """The README's own example took 74 s and then 193,182 s; the wait between the two is not running."""
    log = [
        entry(
            14199,
            attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23"),
            attempt("2017-10-07 01:13:30", "2017-10-09 06:53:12"),
        ),
        entry(2, submitted_time="2017-10-07 00:11:39"),
        entry(3, attempt("2017-10-07 01:12:09", None)),
        entry(4, attempt("2017-10-07 01:12:09", None), attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23")),
        entry(5, attempt("None", "2017-10-07 01:13:23")),
        entry(6, attempt("2017-10-07 01:13:23", "2017-10-07 01:12:09")),
        entry(7, attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", gpus=0)),
        entry(
            8,
            attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23"),
            attempt("2017-10-07 01:14:09", "2017-10-07 01:15:23", gpus=4),
        ),
        entry(9, attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23"), submitted_time="yesterday"),
        "no job",
        entry(11, {"detail": None}),
    ]
    path = given_file(tmp_path, json.dumps(log), "cluster_job_log")

    jobs, refused = imported(path, TraceFormat.PHILLY)

    assert jobs == [TraceJob("application_14199", 3600, 193_256, 8, vc="ee9e8c", user="ce2f4c")]
    assert [(item.line, item.reason) for item in refused.kept] == [
        (2, SkipReason.NEVER_RAN),
        (3, SkipReason.STILL_RUNNING),
        (4, SkipReason.MISSING),
        (5, SkipReason.MISSING),
        (6, SkipReason.END_BEFORE_START),
        (7, SkipReason.NO_GPUS),
        (8, SkipReason.SIZE_CHANGED),
        (9, SkipReason.NOT_A_TIME),
        (10, SkipReason.MISSING),
        (11, SkipReason.UNREADABLE),
    ]


def test_muris_milliseconds_become_seconds(tmp_path: Path, data_dir: Path) -> None:
    """Muri writes the columns of Tiresias in another unit: read as seconds, its jobs would last for years."""
    job = read_all(data_dir / "muri" / "cluster_trace_400.csv", TraceFormat.TIRESIAS)[1]

    assert (job.submit_s, job.duration_s, job.model, job.batch_size) == (1534, 281, "vgg16", 16)


BAD_ROWS = {
    "0,4,0,": ("duration_s", SkipReason.MISSING, "is empty"),
    "0,4,0": ("duration_s", SkipReason.MISSING, "is missing: the row has 3 fields"),
    ",4,0,60": ("job_id", SkipReason.MISSING, "is empty"),
    "0,0,0,60": ("num_gpu", SkipReason.NO_GPUS, "is 0; it asks for no GPU"),
    "0,-1,0,60": ("num_gpu", SkipReason.NEGATIVE, "is -1; it cannot be negative"),
    "0,1.5,0,60": ("num_gpu", SkipReason.PART_OF_A_GPU, "is 1.5; whole GPUs or thousandths of one were expected"),
    "0,0.0001,0,60": ("num_gpu", SkipReason.PART_OF_A_GPU, "is 0.0001; whole GPUs or thousandths of one were expected"),
    "0,1e9,0,60": ("num_gpu", SkipReason.TOO_LARGE, "is '1e9'; at most 100000 was expected"),
    "0,four,0,60": ("num_gpu", SkipReason.NOT_A_NUMBER, "is 'four'; a number was expected"),
    "0,1_0,0,60": ("num_gpu", SkipReason.NOT_A_NUMBER, "is '1_0'; a number was expected"),
    "0,١,0,60": ("num_gpu", SkipReason.NOT_A_NUMBER, "is '١'; a number was expected"),
    "0,4,nan,60": ("submit_s", SkipReason.NOT_A_NUMBER, "is 'nan'; a number was expected"),
    "0,4,-5,60": ("submit_s", SkipReason.NEGATIVE, "is -5; it cannot be negative"),
    "0,4,0,inf": ("duration_s", SkipReason.TOO_LARGE, "is 'inf'; at most 3.1536e+08 was expected"),
    "0,4,0,-60": ("duration_s", SkipReason.NEGATIVE, "is -60; it cannot be negative"),
    "0,4,0,0": ("duration_s", SkipReason.ENDED_AT_ONCE, "is 0; it ended as it started"),
    "a,4,0,60": ("", SkipReason.REPEATED_ID, "job 'a' was there before"),
    '"0,4,0,60': ("", SkipReason.UNREADABLE, "cannot be split into fields: unexpected end of data"),
    "x\x07,4,0,60": ("job_id", SkipReason.NOT_TEXT, "is 'x\\x07'; it holds characters that cannot be shown"),
}


@pytest.mark.parametrize("row", sorted(BAD_ROWS))
def test_a_bad_row_is_named_with_file_line_field_and_why_and_the_others_are_read(row: str, tmp_path: Path) -> None:
    """Whoever has a trace with a million rows must be able to find the bad one, and to go on without it."""
    path = given_file(tmp_path, f"job_id,num_gpu,submit_s,duration_s\na,1,0,5\n\n{row}\nb,2,1,7\n")

    jobs, refused = imported(path, TraceFormat.CSV)

    field, reason, problem = BAD_ROWS[row]
    assert [job.job_id for job in jobs] == ["a", "b"]
    assert refused.counts == {reason: 1}
    assert str(refused.kept[0]) == f"{path}:4: {field} {problem}" if field else f"{path}:4: {problem}"


def test_bytes_that_are_no_text_and_endless_lines_cost_one_row_each(tmp_path: Path) -> None:
    """A damaged spot in a file may not take the rest with it, nor all of the memory."""
    path = tmp_path / "trace.csv"
    path.write_bytes(b"job_id,num_gpu,submit_s,duration_s\n\xff\xfe,1,0,5\n" + b"x" * 300_000 + b",1,0,5\nc,1,0,5\n")

    jobs, refused = imported(path, TraceFormat.CSV)

    assert jobs == [TraceJob("c", 0, 5, 1)]
    assert [(item.line, item.reason) for item in refused.kept] == [(2, SkipReason.NOT_TEXT), (3, SkipReason.UNREADABLE)]


@pytest.mark.parametrize("form", list(TraceFormat))
def test_a_file_that_is_no_trace_is_one_clear_error(form: TraceFormat, tmp_path: Path) -> None:
    """Not a thousand refused rows: the file is wrong, or the format's name."""
    for text in ("", "# only a remark\n", "a,b,c\n1,2,3\n", "one\ttwo\n", '{"not": "a trace"}', "\x00\x00"):
        with pytest.raises(InvalidTrace):
            imported(given_file(tmp_path, text), form)
    with pytest.raises(NotFound, match="there is no file"):
        imported(tmp_path / "none.csv", form)


def test_a_cut_gzip_file_is_an_error_and_no_shorter_trace(tmp_path: Path) -> None:
    """Half a download must not pass for a trace."""
    whole = gzip.compress(b"job_id,num_gpu,submit_s,duration_s\n" + b"".join(b"%d,1,0,5\n" % n for n in range(9999)))
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(InvalidTrace, match="damaged"):
        imported(path, TraceFormat.CSV)


FIELDS = st.text(max_size=12) | st.sampled_from(
    ["0", "1", "8", "-1", "nan", "inf", "1e400", "2020-06-09 18:41:01", "9999-12-31 23:59:59", '"', "\t", "None"]
)
HEADERS = {
    TraceFormat.CSV: "job_id,num_gpu,submit_s,duration_s,cluster,batch_size,deadline_s,weight",
    TraceFormat.ITP: "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration",
    TraceFormat.PHILLY: "timestamp,duration,num_gpus,gpu_time,cluster",
    TraceFormat.HELIOS: HELIOS.strip(),
    TraceFormat.ALIBABA: "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time",
    TraceFormat.TIRESIAS: "job_id,num_gpu,submit_time,iterations,model_name,duration,interval,resource_time_0",
    TraceFormat.GAVEL: "\t".join("ABCDEFGHIJKL"),
}


@pytest.mark.parametrize("form", list(TraceFormat))
@given(data=st.data())
def test_no_row_whatever_it_holds_stops_an_import_or_vanishes(
    form: TraceFormat, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every row is a job that a simulation can hold, or is counted as refused."""
    separator = "\t" if form is TraceFormat.GAVEL else ","
    width = HEADERS[form].count(separator) + 1
    rows = data.draw(st.lists(st.lists(FIELDS, min_size=width - 1, max_size=width + 1), max_size=5))
    lines = [separator.join(fields).replace("\n", "").replace("\r", "") for fields in rows]
    path = tmp_path_factory.mktemp("hostile") / "trace.csv"
    path.write_bytes("\n".join([HEADERS[form], *lines]).encode("utf-8", "surrogatepass"))

    jobs, refused = imported(path, form)

    header_rows = 1 if form is TraceFormat.GAVEL else 0  # its format has none, so ours is a row
    assert len(jobs) + refused.total == header_rows + sum(1 for line in lines if line and not line.isspace())
    for job in jobs:
        assert job.job_id
        assert job.job_id.isprintable()
        assert 0 <= job.submit_s < float("inf")
        assert 0 < job.duration_s < float("inf")
        assert round(job.num_gpu * 1000) >= 1


def test_times_with_a_zone_are_the_moments_that_they_name(tmp_path: Path) -> None:
    """A log that spans a change of the clocks is only right with its zones."""
    moment = datetime(2020, 6, 9, 16, 41, 27, tzinfo=UTC)
    path = given_file(
        tmp_path,
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        f"{moment.isoformat()},66,1,66,a\n2020-06-09T18:41:37+02:00,66,1,66,a\n",
    )

    assert [job.submit_s for job in read_all(path, TraceFormat.PHILLY)] == [0, 10]
