"""What the core's events, commands and records are made of."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False):
    """An immutable value, equal and hashed by its fields.

    A struct rather than a frozen dataclass because a decision makes dozens of them: creating one costs a tenth, and
    one with sixteen fields, such as a job's status, a thirtieth. The garbage collector need not look at them, because
    values that cannot change cannot form cycles.
    """
