"""What the back end `ray` and the process that talks to Ray for it say to each other: one line of JSON each."""

from __future__ import annotations

import msgspec

from fedsched.core.job import Reason


class Start(msgspec.Struct, frozen=True, tag=True):
    """Run a program as an actor."""

    name: str
    node: str
    """Empty for any."""
    program: tuple[str, ...]
    """Arguments of the interpreter."""
    cpus: float
    gpus: float
    memory_bytes: int


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Tell of a task that another driver has started."""

    name: str


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Pass a signal on."""

    names: tuple[str, ...]
    signum: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Nobody will ask about a task again."""

    name: str


Order = Start | Watch | Tell | Forget


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Ray was reached."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """What Ray made of a start."""

    name: str
    problem: str
    """Empty where it took the task."""


class TaskState(msgspec.Struct, frozen=True):
    """How Ray says that a task stands."""

    waiting: bool = False
    """It has no place yet."""
    ended: bool = False
    reason: Reason = Reason.NONE
    message: str = ""


class Stands(msgspec.Struct, frozen=True, tag=True):
    """What has changed."""

    name: str
    state: TaskState


class Nodes(msgspec.Struct, frozen=True, tag=True):
    """Those that live, by each name that people may know them by."""

    names: tuple[str, ...]


News = Ready | Started | Stands | Nodes

_order = msgspec.json.Decoder(Order)
_news = msgspec.json.Decoder(News)


def line(said: Order | News) -> bytes:
    """As it is written to a pipe."""
    return msgspec.json.encode(said) + b"\n"


def order_of(text: bytes | str) -> Order:
    """What the back end wants."""
    return _order.decode(text)


def news_of(text: bytes | str) -> News | None:
    """What the driver tells; None for a line that is not its own: Ray itself may print."""
    try:
        return _news.decode(text)
    except msgspec.DecodeError:
        return None
