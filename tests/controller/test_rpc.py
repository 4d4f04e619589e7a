"""Records on the wire: nothing is lost, nothing is forgotten when a record grows."""

from __future__ import annotations

import math

import msgspec
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from fedsched.adapters.rpc import from_message, to_message
from fedsched.core.cluster import ClusterRecord, Node
from fedsched.core.ids import ClusterName
from fedsched.core.job import JobPhase, JobSpec, JobStatus, Progress, Range, Reason, TaskPlacement, Transition
from fedsched.core.resources import Resources
from fedsched.core.routing import Routing, Verdict
from fedsched.core.views import ClusterView, Explanation, Job, JobAhead, Submission
from fedsched.errors import InvalidInput
from fedsched.pb import jobs_pb2 as pb

PAIRS: list[tuple[type, type[Message]]] = [
    (Resources, pb.Resources),
    (Range, pb.Range),
    (JobSpec, pb.JobSpec),
    (TaskPlacement, pb.TaskPlacement),
    (Progress, pb.Progress),
    (JobStatus, pb.JobStatus),
    (Job, pb.Job),
    (Transition, pb.Transition),
    (Submission, pb.SubmitReply),
    (Routing, pb.Routing),
    (Verdict, pb.Verdict),
    (JobAhead, pb.JobAhead),
    (Explanation, pb.Explanation),
    (Node, pb.Node),
    (ClusterRecord, pb.ClusterRecord),
    (ClusterView, pb.Cluster),
]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(0, 2**40)
floats = st.floats(allow_nan=False)
maybe = st.none() | st.floats(allow_nan=False, allow_infinity=False)
resources = st.builds(Resources, numbers, numbers, numbers)
ranges = st.tuples(numbers, numbers).map(lambda pair: Range(min(pair), max(pair)))
pairs = st.dictionaries(text, text, max_size=3).map(lambda found: tuple(sorted(found.items())))
specs = st.builds(
    JobSpec,
    job_id=text, name=text, run=text, workers=ranges, ps=ranges, worker_demand=resources, ps_demand=resources,
    epochs=floats, job_type=text, queue=text, user=text, priority=st.integers(-5, 200), workdir=text, env=pairs,
    accelerators=st.lists(text, max_size=2).map(tuple), clusters=st.lists(text, max_size=2).map(tuple),
    clusters_ranked=st.booleans(), max_attempts=numbers, max_runtime_s=maybe, submitted_s=floats, traceparent=text,
)  # fmt: skip
statuses = st.builds(
    JobStatus,
    job_id=text, phase=st.sampled_from(JobPhase), reason=st.sampled_from(Reason), message=text,
    cluster=st.none() | text, attempt=numbers, seq=numbers,
    placement=st.lists(st.builds(TaskPlacement, text, text), max_size=2).map(tuple),
    progress=st.builds(Progress, floats, numbers, floats, maybe, maybe, st.integers(-1, 9)),
    dispatched_s=maybe, finished_s=maybe,
)  # fmt: skip


@pytest.mark.parametrize(("record", "message"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_has_its_place_in_the_message(record: type, message: type[Message]) -> None:
    """A field that is added to a record and not to the proto would vanish between controller and user."""
    fields = {field.name for field in msgspec.structs.fields(record)}
    assert fields == set(message.DESCRIPTOR.fields_by_name)


@given(st.builds(Job, specs, statuses))
def test_a_job_comes_out_of_a_message_as_it_went_in(job: Job) -> None:
    """What the user asked for is what must run, to the last character of its environment."""
    over_the_wire = pb.Job.FromString(to_message(job, pb.Job).SerializeToString())
    assert from_message(Job, over_the_wire) == job


def test_values_that_json_cannot_say_survive() -> None:
    """A share of a resource that the cluster does not have is infinite; a diverging job's loss is no number."""
    verdict = Verdict(ClusterName("a"), Reason.NONE, "", share=float("inf"))
    assert from_message(Verdict, to_message(verdict, pb.Verdict)) == verdict
    loss = from_message(Progress, to_message(Progress(loss=float("nan")), pb.Progress)).loss
    assert loss is not None
    assert math.isnan(loss)


def test_a_message_that_makes_no_record_is_the_senders_fault() -> None:
    """Another client's mistake must come back as one, not as a failure of the server."""
    with pytest.raises(InvalidInput, match="minimum 3 is above maximum 1"):
        from_message(Range, pb.Range(minimum=3, maximum=1))
    with pytest.raises(InvalidInput, match="workers"):
        from_message(JobSpec, pb.JobSpec(name="x"))
