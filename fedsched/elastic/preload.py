"""Imports all that a job's tasks import, also what torch loads only when an optimiser is first used.

For a launcher that forks tasks: after this a task starts in milliseconds instead of seconds. Starts no thread and opens
nothing, so that forking stays safe.
"""

import torch
import torch._dynamo  # Loaded by the first optimiser that is made; takes longer than torch itself.

from fedsched.elastic import coordinator, server, session

__all__ = ["coordinator", "server", "session", "torch"]
