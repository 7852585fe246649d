from pathlib import Path

import pytest

from launcher.gpus import check_has_gpu, find_gpus, pick_gpu
from launcher.local_pool import LocalCluster
from launcher.redis_server import RedisServer
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.errors import ConfigError


def test_the_drivers_files_are_counted_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "sda1"):
        (tmp_path / name).touch()
    assert find_gpus(None, tmp_path) == ("0", "2", "10")


def test_what_the_user_made_visible_wins(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert find_gpus("3, GPU-8f2a", tmp_path) == ("3", "GPU-8f2a")
    assert find_gpus("", tmp_path) == ()


def test_a_machine_without_a_driver_has_none(tmp_path: Path) -> None:
    assert find_gpus(None, tmp_path) == ()
    assert find_gpus(None, tmp_path / "absent") == ()
    assert pick_gpu((), ()) is None


def test_replicas_go_to_the_gpu_that_the_fewest_have() -> None:
    assert pick_gpu(("0", "1"), ()) == "0"
    assert pick_gpu(("0", "1"), ("0",)) == "1"
    assert pick_gpu(("0", "1"), ("0", "1", "0")) == "1"
    assert pick_gpu(("0", "1"), ("0", "1")) == "0"


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this machine has none"):
        check_has_gpu(None, tmp_path)
    (tmp_path / "nvidia0").touch()
    check_has_gpu(None, tmp_path)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES shows none"):
        check_has_gpu("", tmp_path)


def test_gpus_of_a_windows_host_have_no_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    check_has_gpu(None, tmp_path)


def test_cuda_without_a_gpu_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_start(self: RedisServer) -> None:
        raise AssertionError("Redis was started")

    monkeypatch.setattr(RedisServer, "start", refuse_start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # The model is not there either: that would be told next.
    engine = EngineConfig(model=str(tmp_path / "absent"), device="cuda")
    lines: list[str] = []
    cluster = LocalCluster(ClusterConfig(engine=engine), report=lines.append)
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        cluster.start()
    assert lines == []
    assert cluster.pids() == ()
