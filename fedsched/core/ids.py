"""Names of things, as types that cannot be mixed up, and named streams of chance."""

import random
from typing import NewType

JobId = NewType("JobId", str)
ClusterName = NewType("ClusterName", str)
NodeName = NewType("NodeName", str)
TaskName = NewType("TaskName", str)
"""`worker-<index>`, `ps-<index>` or `coordinator`; unique within one attempt of a job at any moment."""
NAME_PATTERN = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""What clusters, jobs and federations may be called: they become parts of keys, of files and of host names."""


def stream(seed: int, name: str) -> random.Random:
    """A random stream of its own: a new draw elsewhere never shifts this one.

    String seeds do not depend on the interpreter's hash seed.
    """
    return random.Random(f"{seed}/{name}")
