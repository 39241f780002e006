"""Ports of a stack: held from the beginning, and one that is taken is reported with what to do."""

from __future__ import annotations

import socket

import pytest
import typer

from tracelake.cli.dev import chosen_ports
from tracelake.dev.addresses import Ports
from tracelake.domain.errors import Conflict
from tracelake.serving.local_sockets import LOOPBACK


def listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen()
    return listener


def test_a_held_port_refuses_connections_and_is_given_to_nobody() -> None:
    with Ports() as ports:
        taken = [ports.take(name, 0).number for name in ("user", "internal", "query")]
        assert len(set(taken)) == 3
        for port in taken:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((LOOPBACK, port))
            with socket.socket() as rude:
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    rude.bind((LOOPBACK, port))


def test_a_taken_port_is_reported_with_what_to_do() -> None:
    with listen(0) as other, Ports() as ports:
        port = other.getsockname()[1]
        with pytest.raises(Conflict, match=rf"{LOOPBACK}:{port} .*--user-port \(0 .*--port auto"):
            ports.take("user", port)
        assert ports.take_or_any("data", port).number != port


def test_one_port_is_not_given_out_twice() -> None:
    with Ports() as ports:
        port = ports.take("user", 0).number
        with pytest.raises(Conflict, match=f"{port} can't be both the user and the internal port"):
            ports.take("internal", port)
        assert ports.take_or_any("data", port).number != port


def test_one_option_chooses_all_ports_and_their_own_come_first() -> None:
    assert chosen_ports(None, None, None, None) == (8600, 8601, 0)
    assert chosen_ports("auto", None, None, None) == (0, 0, 0)
    assert chosen_ports("auto", 9000, None, None) == (9000, 0, 0)
    assert chosen_ports("9100", None, None, 0) == (9100, 9101, 0)


@pytest.mark.parametrize("given", ["", "free", "-1", "65534", "9" * 30, "٣"])
def test_nonsense_for_all_ports_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="--port takes auto"):
        chosen_ports(given, None, None, None)
