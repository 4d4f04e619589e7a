"""`fedsched trace import` and `trace fit`: what people and programs read, and what each ending's exit code is."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fedsched.cli.trace import ByName
from fedsched.sim.fitting import By
from fedsched.sim.trace_fit import load_fit
from tests.cli.conftest import Run

TRACE = "job_id,num_gpu,submit_s,duration_s\na,8,0,3600\nb,x,10,5\nc,4,100,1800\nd,0,100,5\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "original.csv"
    path.write_text(TRACE)
    return path


def test_the_command_knows_every_way_to_group() -> None:
    """The names are written twice, so that --help needs no simulator."""
    assert {name.value for name in ByName} == {by.value for by in By}


def test_an_import_tells_what_was_taken_what_was_not_and_the_load(run: Run, trace: Path, tmp_path: Path) -> None:
    """Whoever simulates a trace must know first whether the cluster can carry it, and what is missing."""
    out = tmp_path / "trace.csv"

    result = run("trace", "import", "csv", str(trace), str(out), "--gpus", "720")

    assert result.code == 0
    rows = dict(line.split(maxsplit=1) for line in result.out.replace("refused: ", "refused:").splitlines()[1:])
    assert (rows["accepted"], rows["refused:NotANumber"], rows["refused:NoGpus"]) == ("2", "1", "1")
    assert rows["offered"].split()[-1] == "0.500"
    assert f"refused {trace}:3: num_gpu is 'x'; a number was expected" in result.err
    assert [row["job_id"] for row in csv.DictReader(out.read_text().splitlines())] == ["a", "c"]


def test_an_import_is_data_for_programs_and_names_every_refused_row_in_a_file(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    """The screen shows twenty rows; a script that checks a trace needs them all."""
    refused = tmp_path / "refused.csv"
    trace.write_text(TRACE + "".join(f"z{number},0,100,5\n" for number in range(30)))

    result = run("trace", "import", "csv", str(trace), str(tmp_path / "t.csv"), "-o", "json", "--refused", str(refused))

    report = json.loads(result.out)
    assert (report["accepted"], report["refused"]) == (2, {"NoGpus": 31, "NotANumber": 1})
    assert (report["gpu_hours"], report["span_s"], report["gpus_wanted"], report["load"]) == (10, 100, 360, None)
    assert f"refused 12 more rows; all are in {refused}" in result.err
    rows = list(csv.DictReader(refused.read_text().splitlines()))
    assert len(rows) == 32
    assert rows[0] == {
        "file": str(trace),
        "line": "3",
        "field": "num_gpu",
        "reason": "NotANumber",
        "problem": "is 'x'; a number was expected",
    }


def test_what_cannot_be_imported_is_one_error_with_its_exit_code_and_no_file(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    """Scripts go by the code, people by the message; neither may find a file that is no trace."""
    out = str(tmp_path / "out.csv")
    trace.write_text("job_id,num_gpu,start,duration_s,submit_s\na,0,0,5,0\n")

    empty = run("trace", "import", "csv", str(trace), out)
    other = run("trace", "import", "alibaba", str(trace), out)
    missing = run("trace", "import", "csv", str(tmp_path / "none.csv"), out)
    unknown = run("trace", "import", "excel", str(trace), out)

    assert [ending.code for ending in (empty, other, missing, unknown)] == [2, 2, 3, 2]
    assert "has no usable row, 1 refused" in empty.err
    assert "num_gpu is 0" in empty.err
    assert [ending.err.split()[0] for ending in (empty, other, missing)] == ["[FS104]", "[FS104]", "[FS110]"]
    assert not Path(out).exists()


def test_a_folder_that_is_not_there_is_told(run: Run, trace: Path, tmp_path: Path) -> None:
    """A long import that cannot be written must say where it could not be."""
    result = run("trace", "import", "csv", str(trace), str(tmp_path / "no" / "out.csv"))

    assert result.code == 2
    assert f"there is no folder {tmp_path / 'no'}" in result.err


SPEED = "('vgg-16', 'dist_sync', 64, 2, 3, [2.5, 2.25, 2.0], [1.0, 2.0], [0.5, 0.5, 0.25])"


def test_dl2s_speeds_become_the_table_that_speed_models_read(run: Run, tmp_path: Path) -> None:
    """Its original has no licence and cannot ship; whoever fetches it must be able to use it."""
    original = tmp_path / "config_speed.txt"
    bad = ["('vgg-16', 'dist_sync', 64, 2, 3, [2.5], [1.0, 2.0], [0.5, 0.5, 0.25])", "__import__('os')", SPEED, "(1,)"]
    original.write_text("\n".join([SPEED, *bad, "(" * 90_000]))
    out = tmp_path / "speed.csv"

    result = run("trace", "import", "dl2", str(original), str(out), "-o", "json")

    report = json.loads(result.out)
    assert (report["accepted"], report["refused"]) == (1, {"Missing": 2, "RepeatedId": 1, "Unreadable": 2})
    assert list(csv.DictReader(out.read_text().splitlines())) == [
        {
            "model": "vgg-16",
            "sync_mode": "dist_sync",
            "total_batch_size": "64",
            "num_ps": "2",
            "num_worker": "3",
            "total_speed_batches_per_s": "6.75",
            "mean_worker_speed": "2.25",
            "mean_ps_cpu": "1.5",
            "mean_worker_cpu": "0.416667",
        }
    ]
    assert run("trace", "import", "dl2", str(tmp_path / "speed.csv"), str(out)).code == 2


def test_dl2s_table_has_the_columns_of_the_public_one(run: Run, tmp_path: Path, data_dir: Path) -> None:
    """One reader serves both the table in the data folder and an import of one's own."""
    original, out = tmp_path / "config_speed.txt", tmp_path / "speed.csv"
    original.write_text(SPEED)
    run("trace", "import", "dl2", str(original), str(out))

    assert out.read_text().splitlines()[0] == (data_dir / "dl2" / "speed.csv").read_text().splitlines()[0]


def test_a_fit_says_how_alike_it_is_and_can_be_drawn_from(run: Run, tmp_path: Path) -> None:
    """Parameters whose likeness nobody has seen are a guess."""
    path = tmp_path / "mine.csv"
    rows = [f"j{number},{1 + 7 * (number % 4 == 0)},{number * 900},{60 + number % 97 * 30}" for number in range(600)]
    path.write_text("job_id,num_gpu,submit_s,duration_s\n" + "\n".join(rows) + "\n")
    out = tmp_path / "mine.yaml"

    table = run("trace", "fit", str(path), str(out))
    data = json.loads(run("trace", "fit", str(path), str(out), "--by", "all", "--name", "ours", "-o", "json").out)

    assert table.code == 0
    assert table.out.splitlines()[1].split()[:2] == ["mine", "600"]
    assert [(row["cluster"], row["jobs"]) for row in data] == [("ours", 600)]
    assert data[0]["duration_ks"] < 0.05
    assert data[0]["gpu_hours_ratio"] == pytest.approx(1, abs=0.05)
    assert load_fit(str(out)).clusters[0].jobs_per_day == pytest.approx(96, rel=0.1)


def test_a_table_of_speeds_cannot_be_fitted(run: Run, trace: Path, tmp_path: Path) -> None:
    """It holds no jobs."""
    result = run("trace", "fit", str(trace), str(tmp_path / "out.yaml"), "--format", "dl2")

    assert result.code == 2
    assert "'dl2' is not one of" in result.err


def test_a_trace_is_never_written_over_by_its_own_import(run: Run, trace: Path) -> None:
    """It may be the only copy."""
    result = run("trace", "import", "csv", str(trace), str(trace), "--refused", str(trace))
    assert (result.code, trace.read_text()) == (2, TRACE)
    assert "would be written over" in result.err
