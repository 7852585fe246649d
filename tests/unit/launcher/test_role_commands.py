from dataclasses import replace
from pathlib import Path

import pytest

from launcher.role_commands import (
    HIDDEN_FIELDS,
    Site,
    environment_of,
    role_command,
    router_config,
    stage_argvs,
    worker_argv,
    worker_configs,
)
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.load import from_argv, to_argv
from pdserve.config.router import RouterConfig
from pdserve.config.stage import StageConfig
from pdserve.config.worker import FaultConfig, HandoffConfig, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.request import Role

SITE = Site(
    name="c1",
    host="127.0.0.1",
    port=5000,
    http_port=5002,
    metrics_port=5001,
    folder=Path("/models/m"),
    redis_url="redis://:secret@127.0.0.1:6379/0",
    secret="pepper",
)
CONFIG = ClusterConfig(
    engine=EngineConfig(model="smollm2-135m", max_num_seqs=7),
    num_prefill=1,
    num_decode=2,
    max_local_prefill_tokens=32,
    drain_timeout_s=9.0,
    handoff=HandoffConfig(lease_s=4.0),
    prefill_faults=FaultConfig(frame_delay_s=1.0),
    decode_faults=FaultConfig(reject_reservations=2),
)


def test_each_pool_gets_its_replicas_and_its_faults() -> None:
    configs = worker_configs(CONFIG, SITE)
    assert [(c.worker_id, c.role) for c in configs] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    assert [c.faults for c in configs] == [
        CONFIG.prefill_faults,
        CONFIG.decode_faults,
        CONFIG.decode_faults,
    ]


def test_workers_get_the_clusters_settings_and_the_resolved_folder() -> None:
    for config in worker_configs(CONFIG, SITE):
        assert config.engine == replace(CONFIG.engine, model="/models/m")
        assert config.handoff == CONFIG.handoff
        assert config.cluster == "c1"
        assert config.max_local_prefill_tokens == 32
        assert config.drain_timeout_s == 9.0


def test_router_is_told_to_refuse_unknown_fields() -> None:
    assert not router_config(CONFIG, SITE).strict_fields
    config = router_config(replace(CONFIG, strict_fields=True), SITE)
    assert from_argv(RouterConfig, to_argv(config), {}, program="pdserve router").strict_fields


def test_times_of_life_and_death_reach_those_who_keep_them() -> None:
    config = replace(
        CONFIG,
        heartbeat_s=0.1,
        registry_lease_s=1.0,
        frozen_after_s=2.0,
        orphan_grace_s=3.0,
        worker_silence_s=4.0,
    )
    for worker in worker_configs(config, SITE):
        assert (worker.heartbeat_s, worker.registry_lease_s) == (0.1, 1.0)
        assert (worker.frozen_after_s, worker.orphan_grace_s) == (2.0, 3.0)
    assert router_config(config, SITE).worker_silence_s == 4.0


def test_colocated_cluster_has_decode_workers_only() -> None:
    configs = worker_configs(replace(CONFIG, num_prefill=0), SITE)
    assert [config.worker_id for config in configs] == ["decode-0", "decode-1"]


def test_router_serves_the_model_under_the_name_it_was_given() -> None:
    config = router_config(CONFIG, SITE)
    assert config.model == "/models/m"
    assert config.served_model_name == "smollm2-135m"
    named = router_config(replace(CONFIG, served_model_name="mine"), SITE)
    assert named.served_model_name == "mine"


def test_the_router_gets_as_many_fronts_as_the_cluster_has() -> None:
    assert router_config(CONFIG, SITE).fronts == 1
    assert router_config(replace(CONFIG, fronts=3), SITE).fronts == 3


@pytest.mark.parametrize("kind", [ClusterConfig, RouterConfig])
def test_fewer_fronts_than_one_are_refused(kind: type) -> None:
    config = CONFIG if kind is ClusterConfig else router_config(CONFIG, SITE)
    with pytest.raises(ConfigError, match="fronts must be at least 1, got 0"):
        replace(config, fronts=0)


def test_passwords_keys_and_secrets_travel_in_the_environment_alone() -> None:
    with_keys = replace(CONFIG, api_keys=("a=secret-key", "secret-other"))
    for config in (router_config(with_keys, SITE), *worker_configs(with_keys, SITE)):
        assert environment_of(config)["PDSERVE_REDIS"] == SITE.redis_url
        flags = " ".join(to_argv(config, without=("role", *HIDDEN_FIELDS)))
        assert "secret" not in flags
        assert "pepper" not in flags
        assert "secret" not in repr(config).replace(SITE.redis_url, "")


def test_router_reads_its_keys_back_and_workers_get_none() -> None:
    config = router_config(replace(CONFIG, api_keys=("a=k1", "k2")), SITE)
    argv = to_argv(config, without=HIDDEN_FIELDS)
    read = from_argv(RouterConfig, argv, environment_of(config), program="pdserve router")
    assert read == config
    for worker in worker_configs(CONFIG, SITE):
        assert environment_of(worker)["PDSERVE_API_KEY"] == ""
        assert environment_of(worker)["PDSERVE_CLUSTER_SECRET"] == ""


def test_each_role_has_its_own_module() -> None:
    assert role_command("prefill-worker")[1:] == ("-m", "launcher.roles.prefill_worker")


def test_A15_the_pools_may_differ_in_their_numbers_of_ranks() -> None:
    engine = replace(CONFIG.engine, tensor_parallel=2)
    config = replace(CONFIG, engine=engine, decode_tensor_parallel=1, decode_pipeline_parallel=3)
    shapes = {
        worker.role: (worker.engine.tensor_parallel, worker.engine.pipeline_parallel)
        for worker in worker_configs(config, SITE)
    }
    assert shapes == {Role.PREFILL: (2, 1), Role.DECODE: (1, 3)}


def test_the_router_has_the_clusters_bounds_on_requests() -> None:
    config = router_config(replace(CONFIG, max_queued=20, max_in_flight=30), SITE)
    assert (config.max_queued, config.max_in_flight) == (20, 30)


def test_streams_wait_longer_for_a_worker_where_a_launcher_starts_it_again() -> None:
    alone = RouterConfig(model="m", redis_url="redis://127.0.0.1:1")
    assert router_config(CONFIG, SITE).no_worker_wait_s > alone.no_worker_wait_s


SPREAD = replace(
    CONFIG,
    engine=replace(CONFIG.engine, pipeline_parallel=3),
    spread_stages=True,
    stage_token="a token of this test",
    stage_silence_s=2.5,
)


def test_each_stage_behind_the_first_has_a_command_that_tells_where_it_belongs() -> None:
    worker = worker_configs(SPREAD, SITE)[1]
    first, second = stage_argvs(worker, role_command)
    prefix = role_command("stage")
    assert first[: len(prefix)] == prefix
    environment = dict(environment_of(worker))
    found = from_argv(StageConfig, second[len(prefix) :], environment, program="pdserve stage")
    assert (found.worker_id, found.stage) == ("decode-0", 2)
    assert (found.cluster, found.host) == ("c1", "127.0.0.1")
    assert found.redis_url == SITE.redis_url
    assert found.stage_token == "a token of this test"


def test_a_workers_token_is_told_by_variable_alone() -> None:
    worker = worker_configs(SPREAD, SITE)[0]
    argv = to_argv(worker, without=("role", *HIDDEN_FIELDS))
    assert "a token of this test" not in " ".join(argv)
    assert environment_of(worker)["PDSERVE_STAGE_TOKEN"] == "a token of this test"
    assert environment_of(router_config(SPREAD, SITE))["PDSERVE_STAGE_TOKEN"] == ""
    assert "--spread-stages" in argv
    assert argv[argv.index("--stage-silence-s") + 1] == "2.5"


def test_stages_on_the_node_of_their_face_need_no_command() -> None:
    together = replace(SPREAD, spread_stages=False)
    alone = replace(SPREAD, engine=CONFIG.engine)
    for config in (together, alone):
        assert stage_argvs(worker_configs(config, SITE)[0], role_command) == ()


def test_replica_that_can_flip_is_told_its_role_by_flag_and_others_by_their_program() -> None:
    fixed = worker_configs(CONFIG, SITE)[0]
    assert worker_argv(fixed, role_command)[2] == "launcher.roles.prefill_worker"
    free = worker_configs(replace(CONFIG, can_flip=True), SITE)[0]
    assert free.roles == (Role.PREFILL, Role.DECODE)
    argv = worker_argv(free, role_command)
    assert argv[2] == "launcher.roles.either_worker"
    found = from_argv(WorkerConfig, argv[3:], {"PDSERVE_REDIS": SITE.redis_url}, program="p")
    assert found == free


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_replicas_of_several_ranks_can_flip_where_both_pools_have_one_shape(
    tensor: int, stages: int
) -> None:
    engine = replace(CONFIG.engine, tensor_parallel=tensor, pipeline_parallel=stages)
    found = worker_configs(replace(CONFIG, can_flip=True, engine=engine), SITE)
    assert {worker.engine.num_ranks for worker in found} == {tensor * stages}
    assert {len(worker.roles) for worker in found} == {2}


def test_pools_of_unlike_shapes_cannot_flip_and_the_flags_are_named() -> None:
    with pytest.raises(ConfigError, match=r"2 x 1 ranks by --decode-tensor.*replicas \(1 x 1\)"):
        replace(CONFIG, can_flip=True, decode_tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"1 x 4 ranks by .*--decode-pipeline-parallel-size"):
        replace(CONFIG, can_flip=True, decode_pipeline_parallel=4)


def test_stages_on_other_nodes_cannot_flip() -> None:
    engine = replace(CONFIG.engine, pipeline_parallel=2)
    with pytest.raises(ConfigError, match="can_flip must be off: with --spread-stages"):
        replace(CONFIG, can_flip=True, spread_stages=True, engine=engine)
    (one, *_) = worker_configs(CONFIG, SITE)
    with pytest.raises(ConfigError, match="can_flip must be off with spread_stages"):
        replace(one, can_flip=True, spread_stages=True, engine=engine)
