from pathlib import Path

import pytest

from launcher.gpus import GpuDealer, check_gpus, check_has_gpu, find_gpus, pick_gpus
from launcher.local_pool import LocalCluster
from launcher.redis_server import RedisServer
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import DeviceKind, EngineConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.request import Role


def test_gpus_of_a_container_that_has_only_some_are_named_as_cuda_counts_them(
    tmp_path: Path,
) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "sda1"):
        (tmp_path / name).touch()
    assert find_gpus(None, tmp_path) == ("0", "1", "2")


def test_what_the_user_made_visible_wins(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert find_gpus("3, GPU-8f2a", tmp_path) == ("3", "GPU-8f2a")
    assert find_gpus("", tmp_path) == ()


def test_a_machine_without_a_driver_has_none(tmp_path: Path) -> None:
    assert find_gpus(None, tmp_path) == ()
    assert find_gpus(None, tmp_path / "absent") == ()


def test_replicas_go_to_the_gpu_that_the_fewest_have() -> None:
    assert pick_gpus(("0", "1"), (), 1) == ("0",)
    assert pick_gpus(("0", "1"), ("0",), 1) == ("1",)
    assert pick_gpus(("0", "1"), ("0", "1", "0"), 1) == ("1",)
    assert pick_gpus(("0", "1"), ("0", "1"), 1) == ("0",)


def test_ranks_of_a_replica_get_a_gpu_each_and_avoid_those_of_other_replicas() -> None:
    gpus = ("0", "1", "2", "3", "4")
    assert pick_gpus(gpus, (), 2) == ("0", "1")
    assert pick_gpus(gpus, ("0", "1"), 2) == ("2", "3")
    assert pick_gpus(gpus, ("0", "2"), 2) == ("1", "3")
    # Too few for all: replicas share, ranks of one replica do not.
    assert pick_gpus(gpus, ("0", "1", "2", "3"), 4) == ("0", "1", "2", "4")


def engine(tensor: int = 1, stages: int = 1, device: DeviceKind = "cuda") -> EngineConfig:
    return EngineConfig(
        model="m", device=device, tensor_parallel=tensor, pipeline_parallel=stages
    )  # fmt: skip


def test_a_replica_with_more_ranks_than_gpus_is_refused_with_both_numbers() -> None:
    check_gpus(Role.DECODE, engine(2, 2), 4, ("0", "1", "2", "3"))
    with pytest.raises(
        ConfigError,
        match=r"a decode replica of 2 tensor ranks in 2 stages needs 4 GPUs here, one a rank; "
        r"this machine shows 3 \(0, 1, 5\)",
    ):
        check_gpus(Role.DECODE, engine(2, 2), 4, ("0", "1", "5"))


def test_gpus_without_names_and_processors_are_not_counted() -> None:
    check_gpus(Role.PREFILL, engine(2, 2), 4, ())
    check_gpus(Role.PREFILL, engine(2, 2, device="cpu"), 4, ("0",))
    assert pick_gpus((), (), 4) == ()


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


def worker(name: str, config: EngineConfig, *, is_spread: bool = False) -> WorkerConfig:
    role = Role(name.rpartition("-")[0])
    return WorkerConfig(
        role=role, worker_id=name, engine=config, redis_url="", spread_stages=is_spread
    )  # fmt: skip


def test_replicas_are_dealt_gpus_of_their_own_until_they_leave() -> None:
    dealer = GpuDealer("2,3,5,7")
    assert dealer.deal(worker("prefill-0", engine())) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert dealer.deal(worker("decode-0", engine(2))) == {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert dealer.deal(worker("decode-1", engine(2))) == {"CUDA_VISIBLE_DEVICES": "2,7"}
    dealer.keep(("prefill-0", "decode-1"))
    assert dealer.deal(worker("decode-2", engine(2))) == {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert dealer.deal(worker("decode-3", engine(device="cpu"))) == {}


def test_a_face_with_spread_stages_is_dealt_the_gpus_of_its_own_stage() -> None:
    dealer = GpuDealer("0,1")
    config = ClusterConfig(engine=engine(2, 2), spread_stages=True)
    dealer.check(config)
    with pytest.raises(ConfigError, match="needs 4 GPUs here"):
        dealer.check(ClusterConfig(engine=engine(2, 2)))
    dealt = dealer.deal(worker("decode-0", engine(2, 2), is_spread=True))
    assert dealt == {"CUDA_VISIBLE_DEVICES": "0,1"}
