"""Free addresses: what a server can be given, and be given again after it was killed."""

from __future__ import annotations

import socket

from fedsched.addresses import free_address, is_free


def test_an_address_for_a_server_is_free_and_is_none_that_connections_get() -> None:
    """A client that asks for a dead server's port may be given that very port, and would then talk to itself."""
    for _ in range(50):
        address = free_address()
        assert is_free(address)
        assert int(address.rpartition(":")[2]) < 32_768


def test_an_address_that_is_listened_on_is_not_free() -> None:
    """Two servers on one port would each get some of the requests."""
    address = free_address()
    host, _, port = address.rpartition(":")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen()
        assert not is_free(address)
    assert is_free(address)
