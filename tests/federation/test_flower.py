"""What fedsched relies on in the installed Flower, inside and outside: a new Flower release is judged by this file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsched.adapters import flower
from fedsched.adapters.flower import reply_content
from fedsched.adapters.flower_client import answer, client_app, decline
from fedsched.adapters.flower_grid import StreamGrid
from fedsched.core.ids import ClusterName
from fedsched.federation.exchange import GradientReply, GradientRequest
from fedsched.federation.source import Arrays, Declined, Gradient, Hello
from tests.live.federation import Update

ARRAYS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1.5], np.float32)}
REQUEST = GradientRequest(number=4, base_version=7, batch_size=256, seed=11, traceparent="")


class Source:
    """A learner whose gradient is twice the weights."""

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        if batch_size == 1:
            raise Declined("too few")
        if batch_size == 2:
            raise ZeroDivisionError("a fault")
        return Update({name: 2 * array for name, array in arrays.items()}, samples=batch_size, loss=float("nan"))


def hello() -> Hello:
    return Hello(ClusterName("east"), 3, "0.1.0", "dl2", 7, 100)


class Loop:
    """A grid whose nodes are ClientApps in this process; the bytes go through Flower's serialisation both ways."""

    def __init__(self, nodes: Iterable[int] = (1, 2), mute: Iterable[int] = ()) -> None:
        self.nodes = sorted(nodes)
        self.mute = set(mute)
        self.grid = StreamGrid(self.send, lambda: self.nodes)
        self.app = client_app(hello, Source())

    def send(self, node: int, data: bytes) -> bool:
        if node not in self.nodes:
            return False
        if node not in self.mute:
            reply = answer(self.app, flower.from_bytes(data), flower.context(node))
            self.grid.deliver(node, flower.to_bytes(reply))
        return True

    def ask(self, *nodes: int, batch_size: int = 256) -> list[Message]:
        request = GradientRequest(4, 7, batch_size, 11, "")
        content = flower.request_content(flower.to_record(ARRAYS), request)
        return [self.grid.create_message(content, flower.TRAIN, node, group_id="4") for node in nodes]


def test_weights_and_question_survive_flowers_bytes() -> None:
    """The agent must compute its gradient from exactly the weights that the round is about."""
    loop = Loop()
    (message,) = loop.ask(1)

    arrays, request = flower.read_request(flower.from_bytes(flower.to_bytes(message)).content)

    assert request == REQUEST
    assert sorted(arrays) == ["a", "b"]
    assert all(arrays[name].tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)
    assert arrays["b"].shape == (2, 3)


def test_each_reply_names_its_message_and_its_node() -> None:
    """The grid matches replies by them; if Flower stopped filling them in, rounds would time out."""
    loop = Loop()

    replies = {reply.metadata.src_node_id: reply for reply in loop.grid.send_and_receive(loop.ask(1, 2), timeout=5)}

    assert sorted(replies) == [1, 2]
    read = flower.read_reply(replies[1])
    assert (read.term, read.base_version, read.samples, read.declined) == (3, 7, 256, "")
    assert all(np.array_equal(read.gradients[name], 2 * ARRAYS[name]) for name in ARRAYS)
    assert dict(read.metrics) == {"entropy": 1.5, "mean_reward": 0.25}, "NaN is no number to keep"


def test_a_learner_that_declines_or_fails_still_answers() -> None:
    """Silence would cost the round its whole deadline."""
    loop = Loop()

    (declined,) = loop.grid.send_and_receive(loop.ask(1, batch_size=1), timeout=5)
    (failed,) = loop.grid.send_and_receive(loop.ask(1, batch_size=2), timeout=5)

    assert flower.read_reply(declined).declined == "too few"
    assert failed.has_error()
    assert "ZeroDivisionError('a fault')" in (failed.error.reason or "")


def test_an_agent_can_decline_without_its_learner() -> None:
    """While the learner is busy the round must hear so at once."""
    (message,) = Loop().ask(1)
    flower.set_message_id(message, "m1")

    reply = decline(flower.from_bytes(flower.to_bytes(message)), 3, "busy")

    assert flower.read_reply(reply).declined == "busy"
    assert reply.metadata.reply_to_message_id == "m1"


def test_a_node_that_is_not_there_or_is_lost_answers_with_an_error_at_once() -> None:
    """A dead agent must not make the others wait for the deadline."""
    loop = Loop(nodes=[1, 2], mute=[2])
    # Without an end of its own: a reply that did not come at once would never come.
    replies = iter(loop.grid.send_and_receive(loop.ask(1, 2, 9)))
    first = {reply.metadata.src_node_id: reply for reply in (next(replies), next(replies))}
    assert first[9].error.code == ErrorCode.NODE_UNAVAILABLE
    assert not first[1].has_error()

    loop.grid.lose(2, "the connection was lost")

    (last,) = replies
    assert last.error.code == ErrorCode.NODE_UNAVAILABLE
    assert last.error.reason == "the connection was lost"


def test_the_wait_ends_at_its_time_or_when_the_grid_closes() -> None:
    """Flower's own loop waits for ever when a node is missing; ours must not."""
    loop = Loop(mute=[2])
    replies = list(loop.grid.send_and_receive(loop.ask(1, 2), timeout=0.2))
    assert [reply.metadata.src_node_id for reply in replies] == [1]

    endless = iter(loop.grid.send_and_receive(loop.ask(2)))
    threading.Timer(0.1, loop.grid.close).start()
    assert list(endless) == []


def test_a_reply_that_nobody_waits_for_is_dropped() -> None:
    """A late answer must not be counted in the next round, nor one that another node forged."""
    loop = Loop(mute=[1, 2])
    messages = loop.ask(1)
    waiting = iter(loop.grid.send_and_receive(messages, timeout=0.3))
    reply = answer(loop.app, flower.from_bytes(flower.to_bytes(messages[0])), flower.context(1))
    loop.grid.deliver(2, flower.to_bytes(reply))
    assert list(waiting) == [], "node 2 answered for node 1"

    loop.grid.deliver(1, flower.to_bytes(reply))

    assert list(loop.grid.pull_messages([messages[0].metadata.message_id])) == []


@pytest.mark.parametrize("data", [b"\xff\xff", b"hello", b"\x0a\x02\x08\x01"])
def test_bytes_that_are_no_message_are_a_value_error(data: bytes) -> None:
    """A stranger's bytes must not end the thread that reads them with an unknown exception."""
    with pytest.raises(ValueError, match="not a Flower message"):
        Loop().grid.deliver(1, data)


def test_a_reply_with_other_contents_is_a_value_error() -> None:
    """An agent of another make must be rejected with a reason, not crash the round."""
    (message,) = Loop().ask(1)

    for content in (RecordDict(), RecordDict({"config": ConfigRecord({"term": "x"})})):
        with pytest.raises(ValueError, match="cannot be read"):
            flower.read_reply(Message(content, reply_to=message))


def npy(header: str) -> bytes:
    """A numpy file with this header and no data."""
    text = header.encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=ARRAYS["a"])
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(archive(), id="an archive of arrays"),
        pytest.param(archive()[:40], id="half an archive"),
        pytest.param(npy("(((("), id="a header that no tokenizer ends"),
        pytest.param(npy("__import__('os')"), id="a header that is code"),
        pytest.param(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10**12,)}"), id="a header that computes"),
        pytest.param(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000000,)}"), id="40 petabytes"),
        pytest.param(npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), id="objects"),
    ],
)
def test_arrays_that_cannot_be_read_are_a_value_error(data: bytes) -> None:
    """numpy has an exception of another kind for each of them; one that got through ended the aggregator."""
    (message,) = Loop().ask(1)
    whole = reply_content(GradientReply(3, 7, ARRAYS, 10, (), ""))
    whole.array_records["gradients"]["b"] = Array("float32", (2, 3), "numpy.ndarray", data)

    with pytest.raises(ValueError, match="cannot be read"):
        flower.read_reply(flower.from_bytes(flower.to_bytes(Message(whole, reply_to=message))))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(min_value=0), st.binary(max_size=4), st.integers(0, 20)), min_size=1, max_size=4))
def test_an_answer_with_flipped_bytes_is_an_answer_or_a_value_error(
    changes: list[tuple[int, bytes, int]],
) -> None:
    """Whatever a faulty agent's memory or a stranger makes of an answer, the round goes on without it."""
    (message,) = Loop().ask(1)
    data = flower.to_bytes(Message(reply_content(GradientReply(3, 7, ARRAYS, 10, (), "")), reply_to=message))
    for place, put, cut in changes:
        place %= len(data)
        data = data[:place] + put + data[place + cut :]

    with contextlib.suppress(ValueError):
        read = flower.read_reply(flower.from_bytes(data))
        assert all(isinstance(array, np.ndarray) for array in read.gradients.values())


def test_a_question_that_cannot_be_read_is_answered_with_an_error() -> None:
    """An aggregator of another make must not end the agent that is busy or free: its cluster's jobs need it."""
    question = Message(RecordDict({"config": ConfigRecord({"other": 1})}), 1, flower.TRAIN)

    for reply in (
        decline(question, 3, "busy"),
        answer(client_app(hello, Source()), question, flower.context(1)),
    ):
        assert reply.has_error()


def test_flowers_own_strategy_runs_over_our_grid() -> None:
    """The grid is Flower's interface in full: whoever brings a stock Strategy can use it."""

    class Echo:
        def send(self, node: int, data: bytes) -> bool:
            message = flower.from_bytes(data)
            metrics = MetricRecord({"num-examples": node})
            arrays = ArrayRecord([np.full(2, node, np.float32)])
            reply = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
            self.grid.deliver(node, flower.to_bytes(reply))
            return True

        def __init__(self) -> None:
            self.grid = StreamGrid(self.send, lambda: [1, 3])

    grid: Grid = Echo().grid
    strategy: Strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)

    result = strategy.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=1, timeout=5)

    assert result.arrays is not None
    np.testing.assert_allclose(result.arrays.to_numpy_ndarrays()[0], [2.5, 2.5])


def test_importing_flower_sends_nothing_anywhere() -> None:
    """A scheduler that calls home from a customer's cluster is not installed twice."""
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert not logging.getLogger("flwr").isEnabledFor(logging.INFO)
