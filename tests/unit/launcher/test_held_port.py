"""A port between its choice and its use."""

import errno
import socket
from contextlib import closing

import pytest

from launcher.held_port import HeldPort
from launcher.redis_server import RedisServer
from pdserve.errors import ConfigError
from pdserve.rpc.server import check_port_is_free


def test_nobody_else_is_given_a_port_that_is_held() -> None:
    with closing(HeldPort("127.0.0.1")) as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use") as failure:
            other.bind(("127.0.0.1", held.number))
        assert failure.value.errno == errno.EADDRINUSE


def test_whom_it_is_held_for_may_listen_on_it_again_and_again() -> None:
    with closing(HeldPort("127.0.0.1")) as held:
        for _ in range(2):
            check_port_is_free("127.0.0.1", held.number)
            with socket.create_server(("127.0.0.1", held.number)) as server:
                with pytest.raises(ConfigError, match="already in use"):
                    check_port_is_free("127.0.0.1", held.number)
                with socket.create_connection(("127.0.0.1", held.number), 5) as client:
                    server.accept()[0].close()
                    assert client.recv(1) == b""


def test_one_that_was_let_go_may_be_anybody_s() -> None:
    held = HeldPort("127.0.0.1")
    held.close()
    held.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", held.number))


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        HeldPort("192.0.2.1")


def test_a_redis_keeps_its_port_while_it_is_away() -> None:
    redis = RedisServer()
    with closing(redis), socket.socket() as other:
        redis.start()
        redis.kill()
        with pytest.raises(OSError, match="in use"):
            other.bind((redis.host, redis.port))
        redis.start()
        assert redis.is_running()
