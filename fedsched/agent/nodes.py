"""Follows which of the cluster's nodes take tasks, as the cluster says it: nothing is placed where it is down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from fedsched.core.cluster import Node
from fedsched.core.events import NodeChanged
from fedsched.core.ids import NodeName
from fedsched.runtime.ports import Post

Closed = Callable[[Sequence[NodeName]], Mapping[NodeName, str] | None]
"""Those of the nodes that take no tasks, each with why; None where nobody knows. May wait for the cluster's answer."""
LOOK_S = 2.0
"""How often the cluster is asked."""

_log = logging.getLogger(__name__)


class NodeWatch:
    """Posts `NodeChanged` from a thread when a node closes or opens. What runs on a node that closes is left alone.

    Args:
        nodes: as they are configured; all are taken to be open at first.
    """

    def __init__(self, nodes: Sequence[Node], closed: Closed, post: Post) -> None:
        self._nodes = nodes
        self._ask = closed
        self._post = post
        self._closed: Mapping[NodeName, str] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; does not wait for an answer that is under way."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            found = self._ask([node.name for node in self._nodes])
            if found is not None and not self._ending.is_set():
                self._tell(found)
            self._ending.wait(LOOK_S)

    def _tell(self, found: Mapping[NodeName, str]) -> None:
        for node in self._nodes:
            if node.name in found and node.name not in self._closed:
                _log.warning("node %s takes no tasks: %s", node.name, found[node.name])
            elif node.name in self._closed and node.name not in found:
                _log.info("node %s takes tasks again", node.name)
            else:
                continue
            self._post(NodeChanged(time.time(), replace(node, schedulable=node.name not in found)))
        self._closed = found
