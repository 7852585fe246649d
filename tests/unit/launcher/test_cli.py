"""The command line up to the point where a cluster or a server is needed."""

import json
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from launcher.cli import run_command
from launcher.commands.generate import flag_of, parse_ids, read_chat, set_prompt
from launcher.local_pool import LocalCluster
from launcher.run_cluster import run_until_signal
from pdserve.config.cluster import ClusterConfig
from pdserve.errors import ConfigError, TooLong
from pdserve.rpc.v1 import inference_pb2
from pdserve.version import VERSION


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"pdserve {VERSION}\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["serve"], "Missing argument"),
        (["serve", "x", "--bogus"], "No such option: --bogus"),
        (["serve", "x", "--log-level", "loud"], "Invalid value for '--log-level'"),
        (["serve", "x", "--port", "70000"], "Invalid value for '--port'"),
        (["serve", "x", "--dtype", "int8"], "'float32', 'bfloat16'"),
        (["serve", "x", "--decode", "0"], "--decode must be at least 1, got 0"),
        (["serve", "x", "--prefill", "-1"], "--prefill must be at least 0, got -1"),
        (["serve", "x", "--decode", "3..1"], "--decode: a pool must have 0 <= MIN <= MAX"),
        (["serve", "x", "--decode", "some"], "--decode: a pool's size must be a number or MIN"),
        (["serve", "x", "--max-replicas", "1"], "--max-replicas must be at least 2, got 1"),
        (["serve", "x", "--decode", "1000000000000"], "--decode: a pool must have at most 100000"),
        (["serve", "x", "--ttft-target-s", "0"], "--ttft-target-s must be above 0, got 0"),
        (["serve", "x", "--scaling", "tail=2"], "--scaling tail must be between 0 and 1, got 2"),
        (["serve", "x", "--slo-class", "=ttft_s:1"], "--slo-class must be NAME=ttft_s:S"),
        (["serve", "x", "--handoff", "ring_slots=99"], "--handoff ring_slots must be at most 32"),
        (["serve", "x", "--http-port", "50051"], "--http-port must differ from --port, got 50051"),
        (["serve", "x", "--metrics-port", "8000"], "--metrics-port must differ from --http-port"),
        (
            ["plan", "--trace", "/none", "--model", "m", "--gpu", "none"],
            "--gpu: there is no profile",
        ),
        (["scale", "--decode", "some"], "--decode: a pool's size must be a number or MIN..MAX"),
        (["scale"], "--prefill, --decode or --status is needed"),
        (["scale", "--status", "--cluster", "none"], "no launcher of a cluster named none"),
        (["serve", "x", "-tp", "0"], "--tensor-parallel-size must be at least 1, got 0"),
        (["serve", "x", "-pp", "0"], "--pipeline-parallel-size must be at least 1, got 0"),
        (["serve", "x", "--decode-tensor-parallel-size", "0"], "--decode-tensor-parallel-size "),
        (["serve", "x", "--block-size", "24"], "--block-size must be a power of two"),
        (["serve", "x", "--kv-cache-memory", "lots"], "--kv-cache-memory must be a size"),
        (["serve", "x", "--transports", "push,tape"], "--transports must be some of push, nccl"),
        (["serve", "x", "--transports", ""], "--transports must be some of push, nccl, gloo"),
        (["serve", "x", "--spread-stages"], "--stage-token must have at least 16 characters"),
        (["serve", "x", "--ray-nodes", "any"], "--ray-nodes need --launcher ray"),
        (["serve", "x", "--launcher", "ray", "--ray-nodes", "any"], "needs --ray-address"),
        (
            ["serve", "x", "--launcher", "ray", "--ray-nodes", "any", "--ray-address", "a:1"],
            "needs --redis, at an address that all nodes can reach",
        ),
        (["serve", "x", "--decode-fault", "boom=1"], "--decode-fault knows step_delay_s"),
        (["serve", "no-such-model", "--port", "0", "--http-port", "0"], "no model no-such-model"),
        (["serve", "x", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["generate"], "give exactly one of PROMPT, --messages and --prompt-ids"),
        (["generate", "a", "--prompt-ids", "1"], "give exactly one of"),
        (["generate", "a", "--seed", "99999999999999999999"], "a number is too large or too small"),
        (["generate", "--prompt-ids", "1,x"], "--prompt-ids must be whole numbers"),
        (["generate", "--messages", "/nowhere.json"], "cannot read --messages /nowhere.json"),
        (["bogus"], "No such command 'bogus'"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv) == 2
    written = capsys.readouterr()
    assert written.out == ""
    lines = [line for line in written.err.splitlines() if line.startswith("pdserve: ")]
    assert len(lines) == 1
    assert text in lines[0]
    assert "Traceback" not in written.err


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> object:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("command", ["generate", "status"])
def test_server_that_is_not_there_is_one_line_and_status_1(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "--address", "127.0.0.1:1"]
    assert run_command([*argv, "hi"] if command == "generate" else argv) == 1
    error = capsys.readouterr().err
    assert error == f"pdserve: nobody serves at {argv[2]}\n"


def test_cuda_without_a_gpu_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    argv = ["serve", "x", "--device", "cuda", "--port", "0", "--http-port", "0"]
    assert run_command(argv) == 2
    assert capsys.readouterr().err == (
        "pdserve: --device cuda needs a GPU, but CUDA_VISIBLE_DEVICES shows none\n"
    )


def test_variable_stands_in_for_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_BLOCK_SIZE", "24")
    assert run_command(["serve", "x"]) == 2
    assert "--block-size must be a power of two" in capsys.readouterr().err


def test_chat_is_read_from_a_list_or_an_object(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hé"}]
    for number, content in enumerate((messages, {"messages": messages})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(content))
        assert [(m.role, m.content) for m in read_chat(path).messages] == [("user", "hé")]


@pytest.mark.parametrize("content", ["{", "3", "[3]", '[{"role": "user"}]', '{"other": []}'])
def test_file_that_is_no_chat_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--messages"):
        read_chat(path)


def test_prompt_ids_are_parsed() -> None:
    assert list(parse_ids("1, 2,30").ids) == [1, 2, 30]


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "99999999999"])
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-ids"):
        parse_ids(text)


def test_empty_text_is_a_prompt_for_the_server_to_judge() -> None:
    request = inference_pb2.GenerateRequest()
    set_prompt(request, "", None, None)
    assert request.WhichOneof("prompt") == "text"


class FakeCluster:
    """Sends itself signals while it waits, as an impatient user would."""

    name = "local-7"
    address = "127.0.0.1:1"
    http_address = "127.0.0.1:3"
    metrics_address = "127.0.0.1:2"

    def __init__(self, num_signals: int) -> None:
        self.num_signals = num_signals
        self.stops: list[bool] = []

    def launch(self) -> None:
        pass

    def wait_ready(self) -> bool:
        return True

    def members(self) -> tuple[object, ...]:
        return ()

    def request_stop(self, *, now: bool = False) -> None:
        self.stops.append(now)

    def wait(self) -> None:
        for _ in range(self.num_signals):
            signal.raise_signal(signal.SIGTERM)

    def stop(self, *, now: bool = False) -> None:
        pass


@pytest.mark.parametrize(
    ("num_signals", "stops", "status"), [(1, [False], 0), (2, [False, True], 1)]
)
def test_C15_first_signal_drains_and_the_second_kills(
    num_signals: int, stops: list[bool], status: int
) -> None:
    cluster = FakeCluster(num_signals)
    assert run_until_signal(cluster, nullcontext()) == status  # type: ignore[arg-type]
    assert cluster.stops == stops


def test_what_is_ready_tells_its_name_for_other_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_until_signal(FakeCluster(1), nullcontext())  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert "cluster local-7 (as --cluster of scale takes it)" in lines
    assert lines.index("metrics http://127.0.0.1:2/metrics") < len(lines) - 2


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """What `pdserve serve` would have started."""
    found: list[ClusterConfig] = []

    class Seen(LocalCluster):
        def __init__(self, config: ClusterConfig, **rest: object) -> None:
            found.append(config)
            self.name = "seen"

    monkeypatch.setattr("launcher.commands.serve.LocalCluster", Seen)
    monkeypatch.setattr("launcher.commands.serve.run_until_signal", lambda *_: 0)
    return found


@pytest.mark.parametrize("order", ["gloo,push", "gloo push", " gloo, push "])
def test_the_order_of_transports_reaches_the_workers(order: str, seen: list[ClusterConfig]) -> None:
    assert run_command(["serve", "x", "--transports", order]) == 0
    assert run_command(["serve", "x"]) == 0
    assert [config.handoff.transports for config in seen] == [
        ("gloo", "push"),
        ("push", "nccl", "gloo"),
    ]


@pytest.mark.parametrize(
    ("flags", "sizes", "can_be_empty"),
    [
        (["--prefill", "1..3", "--decode", "2..3"], (1, 2), False),
        (["--prefill", "0..2", "--decode", "1"], (1, 1), True),
        (["--prefill", "0", "--decode", "0..2"], (0, 1), True),
        (["--prefill", "2", "--decode", "1"], (2, 1), False),
    ],
)
def test_pools_start_at_their_least_size_and_with_one_replica_at_least(
    flags: list[str], sizes: tuple[int, int], can_be_empty: bool, seen: list[ClusterConfig]
) -> None:
    assert run_command(["serve", "x", *flags]) == 0
    (config,) = seen
    assert (config.num_prefill, config.num_decode) == sizes
    assert config.can_be_empty is can_be_empty


@pytest.mark.parametrize(
    ("flags", "can_flip"),
    [
        (["--prefill", "1..3", "--decode", "1..3"], True),
        (["--prefill", "1", "--decode", "1..3"], True),
        (["--prefill", "2", "--decode", "2"], False),
        (["--prefill", "0", "--decode", "1..3"], False),
        (["--decode", "1..3", "--no-flips"], False),
        (["--decode", "1..3", "-tp", "2"], True),
        (["--decode", "1..3", "-pp", "2"], True),
        (["--decode", "1..3", "-pp", "2", "--spread-stages"], False),
        (["--decode", "1..3", "--decode-tensor-parallel-size", "2"], False),
        (["--decode", "1..3", "-tp", "2", "--decode-tensor-parallel-size", "2"], True),
        (["--decode", "1..3", "--launcher", "ray"], True),
        (["--prefill", "2", "--decode", "2", "--flips"], True),
    ],
)
def test_replicas_may_flip_where_a_pool_may_change_and_both_have_one_shape(
    flags: list[str],
    can_flip: bool,
    seen: list[ClusterConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_STAGE_TOKEN", "a token that somebody chose")
    assert run_command(["serve", "x", *flags]) == 0
    assert [config.can_flip for config in seen] == [can_flip]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--decode-tensor-parallel-size", "2"], "--flips must be off: decode replicas have ano"),
        (["-pp", "2", "--spread-stages"], "--flips must be off: with --spread-stages"),
        (["--prefill", "0"], "--flips must be off: there is no prefill pool"),
        (
            ["--launcher", "ray", "--ray-pools", "--ray-nodes", "any"],
            "--flips must be off: with --ray-pools each role has nodes of its own",
        ),
    ],
)
def test_flips_that_cannot_be_are_refused_by_name(
    flags: list[str],
    text: str,
    seen: list[ClusterConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["serve", "x", "--decode", "1..3", "--flips", *flags]) == 2
    assert text in capsys.readouterr().err
    assert seen == []


def test_a_token_for_spread_stages_is_made_up_where_ray_starts_them(
    seen: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDSERVE_STAGE_TOKEN", raising=False)
    argv = ["serve", "x", "-pp", "2", "--spread-stages", "--launcher", "ray"]
    assert [run_command(argv), run_command(argv)] == [0, 0]
    monkeypatch.setenv("PDSERVE_STAGE_TOKEN", "a token that somebody chose")
    assert run_command(argv) == 0
    tokens = [config.stage_token for config in seen]
    assert len({*tokens}) == 3
    assert all(token is not None and len(token) >= 16 for token in tokens)
    assert tokens[2] == "a token that somebody chose"
    assert all(config.spread_stages for config in seen)


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("sampling.max_tokens", "--max-tokens"),
        ("sampling.stop[0]", "--stop"),
        ("sampling.stop_token_ids", "--stop-token-id"),
        ("request_id", "--request-id"),
        ("text", "PROMPT"),
        ("token_ids", "--prompt-ids"),
        ("chat.messages[2].role", "--messages [2].role"),
        ("chat", "--messages"),
    ],
)
def test_what_the_router_refuses_is_told_by_the_flag_it_came_from(field: str, flag: str) -> None:
    error = TooLong(field, 9, "at most 5")
    told = error.renamed(flag_of(field))
    assert str(told) == f"{flag} must be at most 5, got 9"
    assert (type(told), told.field, told.limit) == (TooLong, flag, "at most 5")
