"""Job files: what users write, and what they are told when it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedsched import jobfile
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.errors import InvalidJobFile

FULL = """
name: resnet-a
queue: vision
priority: 70
type: cnn
run: python train.py --lr 0.1
env: {SEED: 3, MODE: fast}
workdir: src
resources: {cpus: 4+, memory: 16GB+, accelerators: {V100: 1, T4: 1}}
psResources: {cpus: 0.5, memory: 512MB}
elastic: {ps: 1..2, workers: {min: 2, max: 8}, resize: live, cooldown: 1m30s}
checkpoint: {every: 15m}
placement: {ordered: [onprem, cloud]}
limits: {maxRuntime: 1d2h, maxAttempts: 5}
estimate: {epochs: 90}
"""


def load(folder: Path, text: str) -> JobSpec:
    file = folder / "My Job.yaml"
    file.write_text(text)
    return jobfile.load(file)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(InvalidJobFile) as refused:
        load(folder, text)
    return [line.strip(" -") for line in refused.value.message.splitlines()[1:]]


def test_every_field_arrives(tmp_path: Path) -> None:
    """A field that is read and dropped is worse than one that is refused."""
    assert load(tmp_path, FULL) == JobSpec(
        job_id="",  # type: ignore[arg-type]
        name="resnet-a",
        queue="vision",
        priority=70,
        job_type="cnn",
        run="python train.py --lr 0.1",
        env=(("EPOCHS", "90"), ("MODE", "fast"), ("SEED", "3")),
        workdir=str(tmp_path / "src"),
        worker_demand=Resources(4000, 16 * 1024, 1000),
        ps_demand=Resources(500, 512),
        accelerators=("V100", "T4"),
        ps=Range(1, 2),
        workers=Range(2, 8),
        resize_cooldown_s=90.0,
        checkpoint_every_s=900.0,
        clusters=("onprem", "cloud"),  # type: ignore[arg-type]
        max_runtime_s=93600.0,
        max_attempts=5,
        epochs=90.0,
    )


def test_only_the_command_must_be_given(tmp_path: Path) -> None:
    """The first job file that somebody writes has one line."""
    spec = load(tmp_path, "run: python train.py")
    assert (spec.name, spec.workdir, spec.workers, spec.ps) == ("my-job", str(tmp_path), Range(1, 1), Range(1, 1))
    assert spec.env == (), "nothing is told to the script that the file does not say"


def test_the_long_form_means_the_same(tmp_path: Path) -> None:
    """`apply`-style tools store what a dry run printed."""
    spec = load(tmp_path, FULL)
    assert load(tmp_path, yaml.safe_dump(jobfile.long_form(spec))) == spec
    plain = load(tmp_path, "run: x\nplacement: {any_of: [a, b]}")
    assert not plain.clusters_ranked
    assert load(tmp_path, yaml.safe_dump(jobfile.long_form(plain))) == plain


def test_options_take_the_place_of_fields(tmp_path: Path) -> None:
    """`submit FILE -n NAME -- CMD` is how one file serves many runs."""
    file = tmp_path / "job.yaml"
    file.write_text("run: python train.py")
    spec = jobfile.load(file, name="other", command=["python", "x.py", "--tag", "two words"], user="ana")
    assert (spec.name, spec.run, spec.user) == ("other", "python x.py --tag 'two words'", "ana")


def test_the_scripts_own_epochs_are_the_estimate(tmp_path: Path) -> None:
    """The policy must not plan with another length than the script runs."""
    assert load(tmp_path, "run: x\nenv: {EPOCHS: 7}").epochs == 7.0
    both = load(tmp_path, "run: x\nenv: {EPOCHS: 7}\nestimate: {epochs: 9}")
    assert (both.epochs, dict(both.env)["EPOCHS"]) == (9.0, "7")


def test_all_problems_are_told_at_once_with_their_paths(tmp_path: Path) -> None:
    """One round trip per mistake is what people hate about YAML."""
    found = problems(
        tmp_path,
        """
rnu: x
run: python "x
name: A_b
elastics: {}
elastic: {workers: 4..1, ps: -1, cooldown: soon}
resources: {cpus: 0, memory: 3, accelerators: {V100: 0}}
limits: {maxRuntime: 0s}
env: {"b c": 1}
placement: {ordered: [a], any_of: [b]}
""",
    )
    for expected in (
        "rnu is not a known field; did you mean run?",
        "elastics is not a known field; did you mean elastic?",
        "run: it cannot be read as a command: no closing quotation",
        "name is 'A_b'; at most 63 of a to z, 0 to 9 and -, neither first nor last a -, were expected",
        "elastic.workers: min 4 is above max 1; min must be at most max",
        "elastic.ps.min is -1; input should be greater than or equal to 0",
        "elastic.cooldown: 'soon' is not a duration; 90s, 10m, 1h30m or 2d was expected",
        "resources.cpus is 0; input should be greater than or equal to 0.001",
        "resources.memory: 3 is not an amount of memory; 512MB, 16GB or 16GB+ was expected",
        "resources.accelerators: a number of GPUs must be at least 1",
        "limits.maxRuntime is '0s'; input should be greater than 0",
        "env: 'b c' is not a name of an environment variable",
        "placement: ordered and any_of exclude each other; give one of them",
    ):
        assert expected in found, "\n".join(found)


def test_documented_fields_that_are_not_carried_out_say_so(tmp_path: Path) -> None:
    """`image: x` that is silently ignored runs the wrong program."""
    found = problems(
        tmp_path, "run: x\nimage: a/b:1\nelastic: {workers: {min: 1, max: 2, start: 1}, resize: restart}\n"
    )
    assert len(found) == 3
    assert all("not supported by this version" in line for line in found)
    assert found[0].startswith("image ")
    assert found[1].startswith("elastic.workers.start ")


def test_variables_that_fedsched_sets_cannot_be_set(tmp_path: Path) -> None:
    """A job that names another coordinator would join another job."""
    assert "FEDSCHED_JOB_ID is set by fedsched itself" in problems(tmp_path, "run: x\nenv: {FEDSCHED_JOB_ID: 3}")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file holds nothing"),
        ("- a\n- b", "the file holds a list; fields such as"),
        ("python train.py", "the file holds only 'python train.py'; fields such as"),
        ("apiVersion: v9\nkind: ElasticJob\nspec: {run: x}", "apiVersion is 'v9'"),
        ("apiVersion: fedsched.io/v1alpha1\nkind: ElasticJob", "metadata and spec must hold fields"),
        ("apiVersion: fedsched.io/v1alpha1\nkind: ElasticJob\nspec: {run: x, queu: y}", "spec.queu is not a known"),
        ("run: 7", "run is 7; text was expected; quotes make it one"),
        ("run: x\ncheckpoint: 10s", "checkpoint is '10s'; fields were expected: every"),
        ("run: x\nplacement: [east]", "placement is ['east']; fields were expected: ordered, any_of"),
        ("run: x\nworkers: 1..3", "workers is not a known field; did you mean elastic.workers?"),
        ("run: x\nelastic: {cpus: 2}", "elastic.cpus is not a known field; did you mean resources.cpus?"),
        ("run: x\nelastic: 7", "elastic is 7"),
        ("run: x\nestimate: {epochs: .nan}", "estimate.epochs is nan"),
        ("run: '  '", "it is blank"),
    ],
)
def test_odd_files_are_told_in_words(tmp_path: Path, text: str, message: str) -> None:
    """Nobody should read a stack to learn that a file is empty."""
    assert any(message in line for line in problems(tmp_path, text))


def test_a_file_that_is_no_text_or_not_there_is_told(tmp_path: Path) -> None:
    """A path with a typo is the most frequent mistake of all."""
    with pytest.raises(InvalidJobFile, match="No such file"):
        jobfile.load(tmp_path / "none.yaml")
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidJobFile, match="is not text"):
        jobfile.load(binary)
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(InvalidJobFile, match="is not YAML"):
        jobfile.load(broken)
    broken.write_text("a: " + "[" * 5000)
    with pytest.raises(InvalidJobFile):
        jobfile.load(broken)


@pytest.mark.parametrize(
    "field",
    [
        "resources: {cpus: .inf}",
        "resources: {cpus: inf}",
        "resources: {cpus: .nan}",
        "resources: {cpus: 1e308}",
        f"resources: {{memory: {'9' * 400}GB}}",
        "resources: {accelerators: {V100: 999999999999999999}}",
        "resources: {accelerators: [[V100]]}",
        "elastic: {workers: 1..99999999999999999999}",
        "elastic: {workers: {min: 1, max: 100001}}",
        "elastic: {cooldown: .inf}",
        "checkpoint: {every: .nan}",
        f"checkpoint: {{every: {'9' * 400}d}}",
        "limits: {maxRuntime: 99999999d}",
        "estimate: {epochs: .inf}",
        'env: {A: "b\\0c"}',
        "env: {TRACEPARENT: x}",
        'workdir: "a\\0b"',
    ],
)
def test_values_that_no_record_or_process_can_hold_are_refused(tmp_path: Path, field: str) -> None:
    """Let through, each of these is a fault deep in the federation, or a timer that never rings."""
    told = problems(tmp_path, f"run: python train.py\n{field}\n")
    assert len(told) >= 1
    assert all(line.startswith(field.partition(":")[0]) for line in told), told
    assert len("".join(told)) < 500, "a line for a person holds no novel"


@pytest.mark.parametrize(("written", "read"), [("0", Range(0, 0)), ("2", Range(2, 2)), ("1..3", Range(1, 3))])
def test_a_job_has_servers_or_none(tmp_path: Path, written: str, read: Range) -> None:
    """Without servers its workers reduce gradients among themselves; it cannot change from one kind to the other."""
    assert load(tmp_path, f"run: x\nelastic: {{ps: {written}}}").ps == read


def test_servers_that_might_come_later_are_refused_with_what_would_do(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "run: x\nelastic: {ps: 0..2}")
    assert found.endswith("0..2 is not possible; a job has servers, 1..2 say, or it has none: 0")
