"""What is written to the store is read back equal, by this version and the next."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from fedsched.core.commands import Command
from fedsched.core.events import Event, SlotStarted
from fedsched.core.job import JobStatus
from fedsched.runtime import codec
from tests import strategies
from tests.core.world import dispatched, spec

strategies.register()
EVERYTHING = st.one_of([st.from_type(kind) for kind in (*Event.__args__, *Command.__args__)])


@given(message=EVERYTHING)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_event_and_command_survives_the_journal(message: Event | Command) -> None:
    """A field that does not come back makes a replay lie."""
    assert codec.load_tagged(json.loads(json.dumps(codec.dump_tagged(message)))) == message


def test_an_unknown_field_of_a_newer_writer_is_ignored() -> None:
    """Agents of the version before must cope while a federation is upgraded."""
    plain = json.loads(codec.dumps(dispatched(spec("a"))))
    assert codec.loads(JobStatus, json.dumps({**plain, "invented_later": 1})) == dispatched(spec("a"))


def test_what_is_no_record_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="not a JobStatus"):
        codec.loads(JobStatus, b'{"phase": "Dancing"}')
    for damaged in (b"", b"\xff\xfe", b"[" * 200_000):
        with pytest.raises(ValueError, match="not a JobStatus"):
            codec.loads(JobStatus, damaged)
    with pytest.raises(ValueError, match="unknown event or command 'Nothing'"):
        codec.load_tagged({"_": "Nothing"})


def test_the_same_value_gives_the_same_bytes() -> None:
    assert codec.dumps(SlotStarted(1.0, 2)) == b'{"slot":2,"time_s":1.0}'
