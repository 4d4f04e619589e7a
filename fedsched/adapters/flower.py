"""Flower's messages and records, and every place where fedsched leans on Flower's inside. Nothing else imports it.

Importing this module takes most of a second, so only the processes that take part in rounds do. What is not public
in flwr 1.42, and therefore pinned and checked by tests/federation/test_flower.py:

* `TaskIdentity` must be set before a message can be built from outside a Flower process;
* messages get their id from the SuperLink; without one, the grid sets `metadata._message_id`;
* `message_to_proto` and `message_from_proto` are the only way to bytes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from typing import TypeGuard

# Flower reads these when it is imported: no telemetry, no look for updates.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity

from fedsched.core.ids import ClusterName
from fedsched.federation.exchange import GradientReply, GradientRequest
from fedsched.federation.source import Arrays

logging.getLogger("flwr").setLevel(logging.WARNING)

RUN_ID = 1
SERVER_NODE = 1
TRAIN = "train"
"""Flower asks for these three; there is one run, one server and one kind of question."""


def node_of(cluster: ClusterName) -> int:
    """The Flower node id of a cluster: the same after every restart."""
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:7], "big")


def become_server() -> None:
    """Give this process the identity that Flower wants of whoever builds messages."""
    TaskIdentity.run_id = RUN_ID
    TaskIdentity.task_id = SERVER_NODE
    TaskIdentity.node_id = SERVER_NODE


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that its reply will name."""
    message.metadata.__dict__["_message_id"] = message_id


def to_bytes(message: Message) -> bytes:
    """A message as bytes."""
    return message_to_proto(message).SerializeToString()


def from_bytes(data: bytes) -> Message:
    """The message that `to_bytes` wrote.

    Raises:
        ValueError: the bytes are no Flower message.
    """
    try:
        return message_from_proto(ProtoMessage.FromString(data))
    except Exception as problem:  # whatever a stranger's bytes lead to
        raise ValueError(f"not a Flower message: {problem}") from problem


def context(node_id: int) -> Context:
    """What Flower hands to a ClientApp next to each message."""
    return Context(run_id=RUN_ID, node_id=node_id, node_config={}, state=RecordDict(), run_config={})


def to_record(arrays: Arrays) -> ArrayRecord:
    """Named arrays as a Flower record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(arrays[name])) for name in sorted(arrays)})


def from_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    """The named arrays in a Flower record.

    Raises:
        Exception: of many kinds, where numpy cannot read one: its own, a tokenizer's, one of too little memory.
    """
    arrays = {name: record[name].numpy() for name in sorted(record)}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy also reads archives of arrays
            raise ValueError(f"array {name} is a {type(array).__name__}")
    return arrays


def request_content(arrays: ArrayRecord, request: GradientRequest) -> RecordDict:
    """A round's question as message content."""
    config = ConfigRecord(
        {
            "round": request.number,
            "base-version": request.base_version,
            "batch-size": request.batch_size,
            "seed": request.seed,
            "samples-min": request.samples_min,
            "traceparent": request.traceparent,
        }
    )
    return RecordDict({"arrays": arrays, "config": config})


def read_request(content: RecordDict) -> tuple[Arrays, GradientRequest]:
    """The weights and the question in a message's content."""
    config = content.config_records["config"]
    request = GradientRequest(
        number=_integer(config, "round"),
        base_version=_integer(config, "base-version"),
        batch_size=_integer(config, "batch-size"),
        seed=_integer(config, "seed"),
        traceparent=_text(config, "traceparent"),
        samples_min=_integer(config, "samples-min") if "samples-min" in config else 1,  # older aggregators do not say
    )
    return from_record(content.array_records["arrays"]), request


def reply_content(reply: GradientReply) -> RecordDict:
    """An answer as message content: one ArrayRecord and one MetricRecord, as Flower's own strategies expect."""
    config = _reply_config(reply.term, reply.base_version, reply.traceparent)
    if reply.declined:
        config["declined"] = reply.declined
        return RecordDict({"config": config})
    metrics = MetricRecord()
    metrics["num-examples"] = reply.samples
    for name, value in reply.metrics:
        metrics[name] = value
    return RecordDict({"gradients": to_record(reply.gradients), "metrics": metrics, "config": config})


def _reply_config(term: int, base_version: int, traceparent: str) -> ConfigRecord:
    return ConfigRecord({"term": term, "base-version": base_version, "traceparent": traceparent})


def read_reply(message: Message) -> GradientReply:
    """An agent's answer.

    Raises:
        ValueError: it is not one; the message says what is wrong.
    """
    try:
        return _read_reply(message.content)
    except Exception as problem:  # whatever a stranger's arrays lead to, see `from_record`
        raise ValueError(f"the answer cannot be read: {problem!r}") from problem


def failed_reply(message: Message, why: str) -> Message:
    """The answer of a ClientApp that raised."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)


def lost_reply(message: Message, why: str) -> Message:
    """The answer on behalf of a node that is gone."""
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, why), reply_to=message)


def _read_reply(content: RecordDict) -> GradientReply:
    config = content.config_records["config"]
    declined = _text(config, "declined") if "declined" in config else ""
    gradients = {} if declined else from_record(content.array_records["gradients"])
    metrics = {} if declined else dict(content.metric_records["metrics"])
    samples = metrics.pop("num-examples", 0)
    if not isinstance(samples, int):
        raise ValueError(f"num-examples is {samples!r}; a whole number was expected")
    return GradientReply(
        term=_integer(config, "term"),
        base_version=_integer(config, "base-version"),
        gradients=gradients,
        samples=samples,
        metrics=tuple(sorted((name, float(value)) for name, value in metrics.items() if _is_number(value))),
        traceparent=_text(config, "traceparent"),
        declined=declined,
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _integer(config: ConfigRecord, name: str) -> int:
    value = config[name]
    if not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; a whole number was expected")
    return value


def _text(config: ConfigRecord, name: str) -> str:
    value = config[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; a text was expected")
    return value
