"""`pdserve` as a user gets it wrong, and the rarer ways of getting it right."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.cli import run_command
from tests.integration.test_serve import Served
from tests.support.gguf_files import write_gguf
from tests.support.models import tiny_llama_folder, tiny_qwen2_folder  # noqa: F401
from tests.support.oracle_model import OracleModel

FREE = ("--port", "0", "--http-port", "0")
SMALL = (*FREE, "--kv-cache-memory", "16M", "--max-model-len", "512")
PROMPT = tuple(range(5, 45))

Run = Callable[..., "Done"]


class Done:
    """How one command ended."""

    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status = status
        self.stdout = stdout
        self.stderr = stderr

    def assert_one_line(self, status: int, text: str) -> None:
        """It ends with one clear line on stderr, nothing on stdout, and no traceback."""
        assert self.status == status, self.stderr
        assert self.stdout == ""
        assert "Traceback" not in self.stderr
        told = [line for line in self.stderr.splitlines() if line.startswith("pdserve: ")]
        assert told == self.stderr.splitlines()[-1:], self.stderr
        assert text in told[0]
        # Told once, and not by every replica as well.
        assert not text or sum(text in line for line in self.stderr.splitlines()) == 1, self.stderr
        assert not told[0].startswith("pdserve: error: ")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: the start of Python is most of a short one."""

    def run_pdserve(*argv: str) -> Done:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        status = run_command(list(argv))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        written = capsys.readouterr()
        return Done(status, written.out, written.err)

    return run_pdserve


@contextmanager
def serving(*argv: str) -> Iterator[str]:
    """Runs `pdserve serve` and gives the router's address."""
    served = Served(*argv)
    try:
        yield served.wait_ready()
    finally:
        served.process.kill()
        served.process.wait()


@pytest.fixture
def broken(tiny_llama_folder: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A copy of the model to be spoilt."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


def test_E9_a_folder_of_pickled_weights_is_refused(broken: Path, run: Run) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    done = run("serve", str(broken), *SMALL)
    done.assert_one_line(2, "holds pickled weights only (pytorch_model.bin)")


def test_a_folder_without_a_tokenizer_is_refused(broken: Path, run: Run) -> None:
    (broken / "tokenizer.json").unlink()
    run("serve", str(broken), *SMALL).assert_one_line(2, "holds no tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", '{"model_type": "mamba", "architectures": ["Mamba"]}', "'Mamba'"),
        ("tokenizer.json", "{}", "tokenizer"),
    ],
)
def test_a_spoilt_model_file_is_named(
    broken: Path, run: Run, name: str, content: str, text: str
) -> None:
    (broken / name).write_text(content)
    run("serve", str(broken), *SMALL).assert_one_line(2, text)


def test_a_kv_memory_too_small_for_two_blocks_is_refused(broken: Path, run: Run) -> None:
    done = run("serve", str(broken), *FREE, "--kv-cache-memory", "4K")
    done.assert_one_line(2, "--kv-cache-memory must be at least")


def test_a_model_len_over_the_models_own_is_refused(broken: Path, run: Run) -> None:
    done = run("serve", str(broken), *FREE, "--max-model-len", "999999")
    done.assert_one_line(2, "--max-model-len must be at most")


def test_a_tensor_parallel_size_that_no_head_fits_is_refused_once(broken: Path, run: Run) -> None:
    flags = (*SMALL, "--decode", "2")
    done = run("serve", str(broken), *flags, "--decode-tensor-parallel-size", "3")
    done.assert_one_line(2, "--decode-tensor-parallel-size must divide")


def test_a_gguf_file_cut_short_is_one_line(broken: Path, run: Run, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", broken)
    path.write_bytes(path.read_bytes()[:-1000])
    done = run("serve", str(path), *SMALL)
    done.assert_one_line(2, f"{path} is no readable GGUF file: it is cut short or damaged")


@pytest.mark.parametrize("content", ["{", '{"messages": 3}', '[{"role": "user"}]', "", "\ud800"])
def test_a_file_that_is_no_chat_is_refused(tmp_path: Path, run: Run, content: str) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    run("generate", "--messages", str(path)).assert_one_line(2, "--messages")


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "no.such.host.invalid:1", ""])
@pytest.mark.parametrize("command", [("generate", "hi"), ("status",)])
def test_an_impossible_address_is_one_line(
    command: tuple[str, ...], address: str, run: Run
) -> None:
    run(*command, "--address", address).assert_one_line(1, "")


def test_a_qwen2_folder_is_served_with_the_ids_of_transformers(
    tiny_qwen2_folder: Path,  # noqa: F811
    run: Run,
) -> None:
    # No prompt token may be computed on decode, so all of its KV is handed off.
    limit = ("--max-local-prefill-tokens", "0")
    with serving(str(tiny_qwen2_folder), *SMALL, *limit) as address:
        ids = ",".join(map(str, PROMPT))
        flags = ("--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--json")
        done = run("generate", "--prompt-ids", ids, "--address", address, *flags)
        assert done.status == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["token_ids"] == OracleModel(tiny_qwen2_folder).generate(PROMPT, 12)
        assert found["timeline"]["kv_blocks_shipped"] > 0
        assert found["timeline"]["recomputed_tokens"] == 0


def test_dummy_weights_without_a_prefill_pool_are_served_up_to_the_local_limit(
    broken: Path, run: Run
) -> None:
    (broken / "model.safetensors").unlink()
    flags = ("--prefill", "0", "--load-format", "dummy", "--max-local-prefill-tokens", "8")
    with serving(str(broken), *SMALL, *flags) as address:
        at = ("--max-tokens", "3", "--address", address)
        done = run("generate", "--prompt-ids", "5,6,7,8,9,10,11,12", *at, "--json")
        assert done.status == 0, done.stderr
        assert json.loads(done.stdout)["timeline"]["prefill_worker"] == ""
        ids = ",".join(map(str, PROMPT))
        run("generate", "--prompt-ids", ids, *at).assert_one_line(1, "local prefill")
        run("generate", "hi", *at, "--model", "other").assert_one_line(1, "'other' is not served")
        status = json.loads(run("status", "--address", address, "--json").stdout)
        assert (status["num_prefill"], status["num_decode"]) == (0, 1)
