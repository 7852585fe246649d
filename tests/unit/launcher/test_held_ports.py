import socket

import pytest

from launcher.held_ports import HeldPorts
from pdserve.errors import ConfigError
from pdserve.rpc.server import check_port_is_free


def test_a_port_that_was_given_is_returned_and_not_held() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with HeldPorts("127.0.0.1") as held:
        assert held.take(port) == port
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_free_ports_differ_and_nobody_else_gets_them_until_they_are_let_go() -> None:
    with HeldPorts("127.0.0.1") as held:
        ports = {held.take(0) for _ in range(20)}
        assert len(ports) == 20
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports.pop()))


def test_whoever_it_is_held_for_can_listen_on_it_again_and_again() -> None:
    with HeldPorts("localhost") as held:
        port = held.take(0)
        for _ in range(2):
            check_port_is_free("127.0.0.1", port)
            with socket.create_server(("127.0.0.1", port)) as server:
                with socket.create_connection(server.getsockname()) as client:
                    client.close()
                with pytest.raises(ConfigError, match="in use"):
                    check_port_is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with HeldPorts("192.0.2.77") as held, pytest.raises(ConfigError, match="cannot listen on"):
        held.take(0)
