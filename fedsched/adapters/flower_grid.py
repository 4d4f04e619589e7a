"""Flower's Grid over any link that can carry bytes to a node: sends messages, matches replies, never waits for ever."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsched.adapters import flower

_log = logging.getLogger(__name__)

Send = Callable[[int, bytes], bool]
"""Puts bytes on the way to a node without waiting; False when the node is not connected."""


class StreamGrid(Grid):
    """A grid whose nodes are the agents that are connected now.

    A node that is lost answers at once with an error, so a round waits only for those that can still answer. Replies
    that nobody waits for any more are dropped. All methods may be called from any thread.

    Args:
        send: the link to the nodes.
        node_ids: the connected nodes, sorted.
    """

    def __init__(self, send: Send, node_ids: Callable[[], list[int]]) -> None:
        flower.become_server()
        self._send = send
        self._node_ids = node_ids
        self._run = Run.create_empty(flower.RUN_ID)
        self._change = threading.Condition()
        self._pending: dict[str, Message] = {}
        """Sent messages without a reply, by id; an id is never both here and in `_replies`."""
        self._replies: dict[str, Message] = {}
        """Replies that wait to be pulled, by the id of the message that they answer."""
        self._closed = False

    def set_run(self, run: Run) -> None:
        """Take another run's identity."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to; there is one, for ever."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A new message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The connected nodes, sorted."""
        return self._node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns their ids. To a node that is not connected the reply is an error, at once."""
        ids = []
        for message in messages:
            message_id = uuid.uuid4().hex
            flower.set_message_id(message, message_id)
            ids.append(message_id)
            # Pending first: the reply may come before `_send` has returned.
            with self._change:
                self._pending[message_id] = message
            if not self._send(message.metadata.dst_node_id, flower.to_bytes(message)):
                self._resolve(message_id, flower.lost_reply(message, "the agent is not connected"))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have come to these messages; each is returned once."""
        with self._change:
            return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, then give the replies as they come, until all have come or the time is over.

        The messages are sent, and the time starts, when this is called, not when the first reply is asked for.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        return self._collect(list(self.push_messages(messages)), deadline_s)

    def _collect(self, waiting: list[str], deadline_s: float | None) -> Iterator[Message]:
        try:
            while waiting:
                with self._change:
                    while not (found := [key for key in waiting if key in self._replies]) and not self._closed:
                        left_s = None if deadline_s is None else deadline_s - time.monotonic()
                        if left_s is not None and left_s <= 0:
                            return
                        self._change.wait(left_s)
                    if self._closed:
                        return
                    replies = [self._replies.pop(key) for key in found]
                waiting = [key for key in waiting if key not in found]
                yield from replies
        finally:
            self._forget(waiting)

    def deliver(self, node_id: int, data: bytes) -> None:
        """Take a node's reply. What is no reply to a message that this node was sent is dropped.

        Raises:
            ValueError: the bytes are no Flower message.
        """
        reply = flower.from_bytes(data)
        key = reply.metadata.reply_to_message_id
        with self._change:
            asked = self._pending.get(key)
        if asked is None or asked.metadata.dst_node_id != node_id or reply.metadata.src_node_id != node_id:
            _log.info("a reply of node %d is dropped: nobody waits for it", node_id)
            return
        self._resolve(key, reply)

    def lose(self, node_id: int, why: str) -> None:
        """A node is gone: what it has not answered will not be answered."""
        with self._change:
            lost = [key for key, sent in self._pending.items() if sent.metadata.dst_node_id == node_id]
            for key in lost:
                self._replies[key] = flower.lost_reply(self._pending.pop(key), why)
            self._change.notify_all()

    def close(self) -> None:
        """End every wait now, with what has come."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _resolve(self, key: str, reply: Message) -> None:
        with self._change:
            if self._pending.pop(key, None) is not None:
                self._replies[key] = reply
                self._change.notify_all()

    def _forget(self, keys: list[str]) -> None:
        with self._change:
            for key in keys:
                self._pending.pop(key, None)
                self._replies.pop(key, None)
