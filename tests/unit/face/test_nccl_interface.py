import socket
from pathlib import Path

import pytest

from pdserve.config.engine import DeviceKind, EngineConfig
from pdserve.config.load import names_nccl_interface
from pdserve.config.worker import WorkerConfig
from pdserve.face.nccl_interface import find_interface, list_interfaces, nccl_environment
from pdserve.face.rank_process import RankPlace, spawn_rank
from pdserve.request import Incarnation, Role

NODE = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.1", "10.0.0.7", "fd00::5", "fe80::1"),
    "eth01": ("192.168.4.2",),
    "docker0": ("172.17.0.1", "fe80::1"),
}


@pytest.mark.parametrize(
    ("address", "name", "family"),
    [
        ("127.0.0.1", "lo", "AF_INET"),
        ("127.0.0.9", "lo", "AF_INET"),
        ("::1", "lo", "AF_INET6"),
        ("10.0.0.1", "eth0", "AF_INET"),
        ("10.0.0.7", "eth0", "AF_INET"),
        ("192.168.4.2", "eth01", "AF_INET"),
        ("fd00:0::5", "eth0", "AF_INET6"),
    ],
)
def test_nccl_is_told_the_interface_of_the_host_exactly(
    address: str, name: str, family: str
) -> None:
    assert nccl_environment(address, NODE) == {
        "NCCL_SOCKET_IFNAME": f"={name}",
        "NCCL_SOCKET_FAMILY": family,
    }


@pytest.mark.parametrize("address", ["10.0.0.2", "0.0.0.0", "fd00::6"])
def test_an_address_of_no_interface_leaves_nccl_its_own_choice(address: str) -> None:
    assert nccl_environment(address, NODE) == {}


def test_a_link_local_address_is_that_of_its_scope() -> None:
    assert find_interface("fe80::1%docker0", NODE) == "docker0"
    assert find_interface("fe80::1%eth0", NODE) == "eth0"


def test_this_node_has_a_loopback_and_each_address_can_be_bound() -> None:
    interfaces = list_interfaces()
    assert find_interface("127.0.0.1", interfaces) == "lo"
    assert set(interfaces) <= {name for _, name in socket.if_nameindex()}
    for addresses in interfaces.values():
        for address in addresses:
            if ":" not in address:
                with socket.socket() as sock:
                    sock.bind((address, 0))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    # Not the machine's own.
    files = (tmp_path / "own.conf", tmp_path / "etc.conf")
    monkeypatch.setattr("pdserve.config.load.NCCL_FILES", files)
    return monkeypatch


def test_nobody_chose_for_nccl(bare: pytest.MonkeyPatch) -> None:
    assert not names_nccl_interface()
    bare.setenv("NCCL_DEBUG", "INFO")
    assert not names_nccl_interface()


def test_a_choice_in_the_environment_is_left(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("NCCL_SOCKET_IFNAME", "^docker")
    assert names_nccl_interface()


def test_a_choice_in_a_file_of_nccl_is_left(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "etc.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==ib0\n")
    assert names_nccl_interface()
    (tmp_path / "etc.conf").write_text("NCCL_DEBUG=WARN\n")
    named = tmp_path / "other.conf"
    named.write_text("NCCL_SOCKET_FAMILY=AF_INET6\n")
    bare.setenv("NCCL_CONF_FILE", str(named))
    assert names_nccl_interface()


class Unstarted(Exception):
    """Stands for a child; what it would have been told is in `environment`."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__()
        self.environment = environment


@pytest.mark.parametrize(
    ("device", "named", "told"),
    [
        ("cuda", None, "=lo"),
        ("cuda", "eth9", None),
        ("cpu", None, None),
    ],
)
def test_ranks_on_gpus_alone_are_told_and_only_where_nobody_chose(
    bare: pytest.MonkeyPatch, device: DeviceKind, named: str | None, told: str | None
) -> None:
    def refuse(argv: list[str], *, env: dict[str, str], **_: object) -> None:
        raise Unstarted(env)

    bare.setattr("pdserve.face.rank_process.spawn", refuse)
    bare.setattr("pdserve.config.load.NCCL_FILES", ())
    if named is not None:
        bare.setenv("NCCL_SOCKET_IFNAME", named)
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d0",
        host="localhost",
        redis_url="redis://127.0.0.1:1",
        engine=EngineConfig(model="m", device=device),
    )
    with pytest.raises(Unstarted) as caught:
        spawn_rank("nothing", config, Incarnation(1), RankPlace())
    assert caught.value.environment.get("NCCL_SOCKET_IFNAME") == told
