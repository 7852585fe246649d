from pathlib import Path

import pytest

from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.load import (
    cache_folder,
    from_argv,
    from_pairs,
    parse_size,
    settings_of,
    tell_by_flags,
    to_argv,
)
from pdserve.config.router import RouterConfig
from pdserve.config.worker import FaultConfig, HandoffConfig, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

REQUIRED = ("--worker-id", "p0", "--model", "tiny", "--redis", "redis://127.0.0.1:1")
WORKER = WorkerConfig(
    role=Role.PREFILL,
    worker_id="p0",
    redis_url="redis://127.0.0.1:1",
    engine=EngineConfig(model="tiny"),
)


def parse_worker(*argv: str, environment: dict[str, str] | None = None) -> WorkerConfig:
    return from_argv(
        WorkerConfig,
        argv,
        environment or {},
        program="pdserve prefill-worker",
        fixed={"role": Role.PREFILL},
    )


def test_required_flags_alone_give_the_defaults() -> None:
    assert parse_worker(*REQUIRED) == WORKER


def test_every_worker_field_survives_the_way_through_flags() -> None:
    config = WorkerConfig(
        role=Role.PREFILL,
        worker_id="p7",
        redis_url="redis://127.0.0.1:9",
        host="127.0.0.2",
        port=1234,
        metrics_port=1235,
        cluster="c",
        max_waiting=5,
        max_local_prefill_tokens=0,
        heartbeat_s=0.25,
        registry_lease_s=1.5,
        frozen_after_s=2.5,
        drain_timeout_s=7.5,
        engine=EngineConfig(
            model="/tmp/a folder",
            load_format="dummy",
            dtype="bfloat16",
            block_size=8,
            max_model_len=512,
            max_num_seqs=3,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=1 << 20,
            enable_prefix_caching=False,
            seed=9,
        ),
        handoff=HandoffConfig(
            frame_tokens=64,
            ring_slots=2,
            lease_s=1.25,
            look_ahead=1,
            hold_s=2.25,
            call_timeout_s=3.25,
            frame_timeout_s=4.25,
            connect_timeout_s=5.25,
            has_checksums=False,
        ),
        faults=FaultConfig(
            step_delay_s=0.125,
            frame_delay_s=0.25,
            corrupt_frame=1,
            corrupt_frame_silently=2,
            commit_delay_s=0.5,
            reject_reservations=3,
        ),
    )
    assert parse_worker(*to_argv(config, without=("role",))) == config


def test_every_router_field_survives_the_way_through_flags() -> None:
    config = RouterConfig(
        model="tiny", redis_url="redis://127.0.0.1:9", port=7, max_request_bytes=99, max_attempts=2
    )
    assert from_argv(RouterConfig, to_argv(config), {}, program="pdserve router") == config


def test_flags_are_unique() -> None:
    for config_class in (WorkerConfig, RouterConfig):
        flags = [setting.flag for setting in settings_of(config_class)]
        assert len(flags) == len(set(flags))


def test_environment_fills_what_no_flag_gives() -> None:
    environment = {"PDSERVE_MAX_NUM_SEQS": "3", "PDSERVE_FAULT_STEP_DELAY_S": "0.5"}
    config = parse_worker(*REQUIRED, environment=environment)
    assert config.engine.max_num_seqs == 3
    assert config.faults.step_delay_s == 0.5


def test_flag_wins_over_the_environment() -> None:
    environment = {"PDSERVE_MAX_NUM_SEQS": "3"}
    config = parse_worker(*REQUIRED, "--max-num-seqs", "4", environment=environment)
    assert config.engine.max_num_seqs == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--max-num-seqs", "many"), "--max-num-seqs must be a whole number, got 'many'"),
        (("--max-num-seqs", "1.5"), "--max-num-seqs must be a whole number, got '1.5'"),
        (("--heartbeat-s", "nan"), "--heartbeat-s must be a finite number, got 'nan'"),
        (("--heartbeat-s", "soon"), "--heartbeat-s must be a number, got 'soon'"),
        (("--dtype", "int8"), "--dtype must be one of float32, bfloat16, got 'int8'"),
        (("--kv-cache-memory", "lots"), "must be a size such as 512M or 2G, got 'lots'"),
        (("--enable-prefix-caching", "x"), "--enable-prefix-caching must be true or false"),
        (("--block-size", "24"), "block_size must be a power of two from 1 to 128, got 24"),
        (("--no-such-flag", "1"), "unrecognized arguments: --no-such-flag 1"),
        (("--max-num", "1"), "unrecognized arguments: --max-num 1"),
        (("--role", "decode"), "unrecognized arguments: --role decode"),
        (("--port",), "argument --port: expected one argument"),
    ],
)
def test_bad_flag_is_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_worker(*REQUIRED, *argv)
    assert message in str(caught.value)


def test_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="PDSERVE_PORT must be a whole number, got 'x'"):
        parse_worker(*REQUIRED, environment={"PDSERVE_PORT": "x"})


def test_missing_required_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="--redis is required"):
        parse_worker(*REQUIRED[:4])


def test_pairs_build_a_configuration() -> None:
    config = from_pairs(FaultConfig, ["step_delay_s=0.5", "corrupt_frame=3"], "--decode-fault")
    assert config == FaultConfig(step_delay_s=0.5, corrupt_frame=3)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("step_delay_s=x", "--decode-fault step_delay_s must be a number, got 'x'"),
        ("step_delay_s", "--decode-fault step_delay_s must be a number, got ''"),
        ("explode=1", "--decode-fault knows step_delay_s, .* got 'explode'"),
    ],
)
def test_bad_pair_is_named(pair: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_pairs(FaultConfig, [pair], "--decode-fault")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5k", 1536),
        ("2GiB", 2 << 30),
    ],
)
def test_sizes_take_binary_suffixes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "M", "1X", "1 2", "9" * 400, "9999999999T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_size(text)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/pdserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache/pdserve"


def parse_router(*argv: str, environment: dict[str, str] | None = None) -> RouterConfig:
    required = ("--model", "tiny", "--redis", "redis://127.0.0.1:1")
    argv = (*required, *argv)
    return from_argv(RouterConfig, argv, environment or {}, program="pdserve router")


def test_a_repeated_flag_gathers_a_tuple_and_its_variable_is_split_at_spaces() -> None:
    assert parse_router().api_keys == ()
    assert parse_router("--api-key", "a=1", "--api-key", "2").api_keys == ("a=1", "2")
    environment = {"PDSERVE_API_KEY": "a=1  2"}
    assert parse_router(environment=environment).api_keys == ("a=1", "2")
    assert parse_router("--api-key", "3", environment=environment).api_keys == ("3",)


def test_a_bool_flag_may_stand_without_a_value() -> None:
    assert not parse_router().no_http
    assert parse_router("--no-http").no_http
    assert parse_router("--no-http", "--port", "1").port == 1
    assert not parse_router("--no-http", "false").no_http


def test_keys_and_secrets_are_not_in_a_configurations_text() -> None:
    config = parse_router("--api-key", "topsecret", "--cluster-secret", "pepper")
    assert "topsecret" not in repr(config)
    assert "pepper" not in repr(config)
    assert parse_router(*to_argv(config, without=("model", "redis_url"))) == config


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("max_model_len must be 9", ["max_model_len"], "--max-model-len must be 9"),
        (
            "kv_cache_memory_bytes must be 4",
            ["kv_cache_memory_bytes"],
            "--kv-cache-memory must be 4",
        ),
        (
            "tensor_parallel must divide 3",
            ["tensor_parallel"],
            "--tensor-parallel-size must divide 3",
        ),
        ("num_prefill must be 0", ["num_prefill"], "--prefill must be 0"),
        ("slo_classes: 'a' is no number", ["slo_classes"], "--slo-class: 'a' is no number"),
        ("use dtype bfloat16", ["dtype"], "use --dtype bfloat16"),
        ("ring_slots must be 3", ["ring_slots"], "--handoff ring_slots must be 3"),
        (
            "http_port must differ from port, got 1 for both",
            ["http_port", "port"],
            "--http-port must differ from --port, got 1 for both",
        ),
        # Of a command of its own.
        ("trace t is empty", ["trace"], "--trace t is empty"),
        ("--prefill must be 1", ["--prefill"], "--prefill must be 1"),
        ("model folder m holds no weights", [], "model folder m holds no weights"),
    ],
)
def test_a_refusal_names_the_flag(text: str, settings: list[str], told: str) -> None:
    assert tell_by_flags(ConfigError(text, settings=settings), ClusterConfig) == told


def test_a_worker_of_its_own_has_a_flag_for_each_part_of_the_handoff() -> None:
    error = ConfigError("ring_slots must be at most 32, got 99", settings=["ring_slots"])
    told = "--handoff-ring-slots must be at most 32, got 99"
    assert tell_by_flags(error, WorkerConfig) == told


def test_a_pair_that_is_out_of_range_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--handoff ring_slots must be at most 32, got 99$"):
        from_pairs(HandoffConfig, ["ring_slots=99"], "--handoff")


def test_ranks_of_decode_replicas_alone_are_told_by_their_own_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(engine=EngineConfig(model="tiny"), decode_tensor_parallel=0)
    told = "--decode-tensor-parallel-size must be at least 1, got 0"
    assert tell_by_flags(caught.value, ClusterConfig) == told


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        ({"http_port": 50051}, "--http-port must differ from --port, got 50051 for both"),
        ({"metrics_port": 50051}, "--metrics-port must differ from --port, got 50051 for both"),
        ({"metrics_port": 8000}, "--metrics-port must differ from --http-port, got 8000 for both"),
    ],
)
def test_two_listeners_of_one_port_are_refused_before_anything_starts(
    ports: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError) as of_cluster:
        ClusterConfig(engine=EngineConfig(model="tiny"), **ports)
    with pytest.raises(ConfigError) as of_router:
        RouterConfig(model="tiny", redis_url="redis://127.0.0.1:1", **ports)
    assert tell_by_flags(of_cluster.value, ClusterConfig) == told
    assert tell_by_flags(of_router.value, RouterConfig) == told


def test_a_port_that_is_not_listened_on_or_any_that_is_free_may_be_given_twice() -> None:
    engine = EngineConfig(model="tiny")
    assert ClusterConfig(engine=engine, port=8000, no_http=True).http_port == 8000
    assert ClusterConfig(engine=engine, port=0, http_port=0, metrics_port=0).port == 0


def test_a_gpu_has_defaults_of_its_own_and_flags_still_win() -> None:
    engine = parse_worker(*REQUIRED, "--device", "cuda").engine
    assert (engine.dtype, engine.max_num_seqs, engine.max_num_batched_tokens) == (
        "bfloat16",
        256,
        8192,
    )
    chosen = parse_worker(*REQUIRED, "--device", "cuda", "--dtype", "float32").engine
    assert (chosen.dtype, chosen.max_num_seqs) == ("float32", 256)


def test_gpu_settings_survive_the_way_through_flags() -> None:
    engine = EngineConfig(
        model="tiny",
        device="cuda",
        gpu_memory_utilization=0.5,
        deterministic=True,
        enforce_eager=True,
        max_num_seqs=7,
    )
    config = WorkerConfig(
        role=Role.PREFILL, worker_id="p0", redis_url="redis://127.0.0.1:1", engine=engine
    )
    assert parse_worker(*to_argv(config, without=("role",))) == config


@pytest.mark.parametrize("share", ["0", "1.1", "-0.5"])
def test_share_of_gpu_memory_out_of_range_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization must be in \(0, 1\]"):
        parse_worker(*REQUIRED, "--gpu-memory-utilization", share)
