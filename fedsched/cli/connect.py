"""Finds the controller that a command talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedsched.adapters.rpc import JobsClient

Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="FEDSCHED_SERVER",
        metavar="HOST:PORT",
        help="A controller, if not the one that `fedsched up` started here.",
    ),
]


def connect(server: str) -> JobsClient:
    """A client of `server`, or of the federation that `up` started on this machine.

    Raises:
        Unreachable: no address is given and none runs here.
    """
    from fedsched.adapters.rpc import JobsClient

    return JobsClient(address(server))


def address(server: str) -> str:
    """The controller's address, checked for its form."""
    import re

    from fedsched.errors import InvalidInput
    from fedsched.local import current

    if not server:
        return current().controller
    if not re.fullmatch(r"[^:\s]+:\d{1,5}", server):
        raise InvalidInput(f"server {server!r} is not an address; host:port was expected", "e.g. 127.0.0.1:7480")
    return server


def user() -> str:
    """Who gives the command; empty where the machine does not know."""
    import getpass

    try:
        return str(getpass.getuser())
    except (KeyError, OSError):
        # A container may run as a user without a name.
        return ""
