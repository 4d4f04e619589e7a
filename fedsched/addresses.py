"""Addresses of this machine: which are free to listen on."""

from __future__ import annotations

import random
import socket

LOOPBACK = ("127.", "localhost:", "[::1]:")


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """Options of a gRPC channel to host:port: to this machine never through a proxy, whatever the environment says."""
    return (("grpc.enable_http_proxy", 0),) if address.startswith(LOOPBACK) else ()


def listen_problem(address: str) -> OSError | None:
    """What keeps a server from listening on host:port now; None when nothing does."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        # As servers bind: an address that is merely in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as problem:
            return problem
    return None


def is_free(address: str) -> bool:
    """Whether a server could listen on host:port now."""
    return listen_problem(address) is None


def free_address() -> str:
    """A host:port of the loopback that was free a moment ago; whoever binds it must bear that it no longer is.

    Connections get their own ports from 32768 on. A server's lies below: one that is started again must find its port
    free, and a client that asks for it meanwhile must not be given that very port and so connect to itself.
    """
    chance = random.SystemRandom()  # others who choose may have been given the same seed
    while True:
        address = f"127.0.0.1:{chance.randrange(20_000, 32_768)}"
        if is_free(address):
            return address
