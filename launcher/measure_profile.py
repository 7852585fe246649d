"""Measures a model on this device in a process of its own: `python -m launcher.measure_profile`.

Steps go through the real schedulers, the engine's pipeline and the runner; only the processes
around them are left out. What comes out are the laws of `Profile`, fitted to the steps' times.
"""

import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from decode_worker.scheduler import DecodeScheduler
from pdserve.config.engine import EngineConfig
from pdserve.config.load import tell_by_flags
from pdserve.config.wire import worker_config_from_json
from pdserve.config.worker import WorkerConfig
from pdserve.engine.batch import StepRunner, lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.errors import ConfigError, PdserveError
from pdserve.predictor.linear_fit import LinearFit
from pdserve.predictor.profile import Profile
from pdserve.rank.loading import LoadedRank, RankArguments, load_rank
from pdserve.rank.meeting import FolderMeeting
from pdserve.request import Incarnation, Request, RequestId, SamplingParams
from pdserve.timeline import MonotonicClock
from prefill_worker.scheduler import PrefillScheduler

NUM_RUNS = 2
WARM_STEPS = 3
DECODE_STEPS = 8
_FADES_NEVER = 1e9
_MOST_TOKENS = {"cpu": 8192, "cuda": 64 * 2048}
"""KV tokens of a decode step that is measured: long ones take long on a CPU."""
Terms = tuple[float, ...]
Sample = tuple[Terms, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """An engine that is measured."""

    runner: StepRunner
    engine: EngineConfig
    num_blocks: int
    vocab_size: int
    max_model_len: int

    @property
    def kv_tokens(self) -> int:
        """That the cache holds."""
        return self.num_blocks * self.engine.block_size


def main() -> int:
    """Reads {"worker", "model", "link_bytes_per_s"} from stdin and writes the profile to stdout.

    With status 2 that is one line instead: why there is none.
    """
    order = json.load(sys.stdin)
    config = worker_config_from_json(json.dumps(order["worker"]))
    try:
        profile = measure(config, order["model"], float(order["link_bytes_per_s"]))
    except ConfigError as error:
        sys.stdout.write(tell_by_flags(error, WorkerConfig))
        return 2
    except PdserveError as error:
        sys.stdout.write(str(error))
        return 2
    sys.stdout.write(profile.to_json())
    return 0


def measure(config: WorkerConfig, model: str, link_bytes_per_s: float) -> Profile:
    """Loads a model and measures it.

    Raises:
        ConfigError: it cannot be loaded, or is spread over several ranks.
    """
    if config.engine.num_ranks > 1:
        raise ConfigError("a profile of several ranks is not measured here: use one")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = RankArguments(
            incarnation=Incarnation(1),
            rank=0,
            meeting=FolderMeeting(Path(folder)),
            rank_channels=(),
        )
        loaded = load_rank(config, arguments, MonotonicClock(), _tell_phase)
    stand = _make_stand(loaded)
    prefill_sizes, decode_sizes = tuple(_prefill_sizes(stand)), tuple(_decode_sizes(stand))
    if not prefill_sizes or not decode_sizes:
        raise ConfigError(
            f"no step to measure fits {stand.kv_tokens} KV tokens and a context of "
            f"{stand.max_model_len}"
        )
    prefill = [_prefill_sample(stand, *size) for size in prefill_sizes]
    decode = [_decode_sample(stand, *size) for size in decode_sizes]
    engine = stand.engine
    device = "cpu" if engine.device == "cpu" else torch.cuda.get_device_name()
    prefill_law, prefill_error = _fit(prefill)
    decode_law, decode_error = _fit(decode)
    return Profile(
        worker_class=f"{device}-{model}-{engine.dtype}-tp1".lower().replace(" ", "-"),
        prefill=(prefill_law[0], prefill_law[1], prefill_law[2]),
        decode=(decode_law[0], decode_law[1], decode_law[2]),
        transfer=(0.002, 1.0 / link_bytes_per_s),
        kv_bytes_per_token=loaded.geometry.bytes_per_token,
        kv_tokens=stand.kv_tokens,
        num_gpus=0 if engine.device == "cpu" else 1,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        detail={
            "device": device if engine.device == "cuda" else platform.processor() or "cpu",
            "model": model,
            "dtype": engine.dtype,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "error": f"mean: prefill {prefill_error:.1%}, decode {decode_error:.1%}",
            "transfer": f"not measured: {link_bytes_per_s / 1e9:g} GB/s and 2 ms",
        },
    )


def _tell_phase(name: str, seconds: float, detail: str) -> None:
    sys.stderr.write(f"{name}: {seconds:.1f} s {detail}\n")


def _make_stand(loaded: LoadedRank) -> Stand:
    runner = loaded.make_runner(None, None)
    runner.warm_up()
    return Stand(
        runner=runner,
        engine=loaded.worker.engine,
        num_blocks=loaded.kv.num_blocks,
        vocab_size=loaded.config.vocab_size,
        max_model_len=loaded.max_model_len,
    )


def _prefill_sizes(stand: Stand) -> Iterator[tuple[int, int]]:
    """Yields tokens of a step, and tokens before them."""
    budget, room = stand.engine.max_num_batched_tokens, stand.max_model_len - 1
    for context in (0, 2 * budget):
        for share in (8, 2, 1):
            count = max(1, budget // share)
            if context + count <= room:
                yield count, context


def _decode_sizes(stand: Stand) -> Iterator[tuple[int, int]]:
    """Yields sequences, and tokens of each."""
    steps, engine = DECODE_STEPS + WARM_STEPS + 1, stand.engine
    for prompt in (64, 512, 2048):
        for batch in (1, 4, 8, 16, 32, 64, 128, 256):
            tokens = batch * (prompt + steps + engine.block_size)
            fits = batch <= engine.max_num_seqs and tokens <= stand.kv_tokens * 0.9
            is_short = prompt + steps < stand.max_model_len
            if fits and is_short and batch * prompt <= _MOST_TOKENS[engine.device]:
                yield batch, prompt


def _prefill_sample(stand: Stand, count: int, context: int) -> Sample:
    numbers = random.Random(f"{count} {context}")
    scheduler = PrefillScheduler(
        stand.engine, stand.num_blocks, "profile", MonotonicClock(), max_waiting=1, look_ahead=1
    )
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    shared = _draw(numbers, context, stand.vocab_size)
    seconds = []
    for run in range(NUM_RUNS + 1):
        prompt = shared + _draw(numbers, count, stand.vocab_size)
        request = _request(f"r{run}", prompt, 2)
        scheduler.submit(request)
        begin_s = time.perf_counter()
        while (ended := pipeline.turn()) is not None:
            took_s = time.perf_counter() - begin_s
            begin_s = time.perf_counter()
            scheduler.complete_step(ended.plan, ended.result)
        scheduler.release(request.request_id, 1)
        seconds.append(took_s)
    # The first run fills the cache with the context; of the others the last step alone is new.
    return (1.0, count, count * (context + count / 2)), statistics.median(seconds[1:])


def _decode_sample(stand: Stand, batch: int, prompt: int) -> Sample:
    numbers = random.Random(f"{batch} {prompt}")
    scheduler = DecodeScheduler(
        replace(stand.engine, enable_prefix_caching=False),
        stand.num_blocks,
        "profile",
        MonotonicClock(),
        max_waiting=batch,
        max_local_prefill_tokens=None,
        lookahead=lookahead_of(stand.runner, 1),
    )
    for index in range(batch):
        prompt_ids = _draw(numbers, prompt, stand.vocab_size)
        request = _request(f"r{index}", prompt_ids, DECODE_STEPS + WARM_STEPS + 1)
        scheduler.reserve(request)
        scheduler.start(request.request_id, 1, {0: numbers.randrange(stand.vocab_size)})
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    ends: list[float] = []
    while (ended := pipeline.turn()) is not None:
        ends.append(time.perf_counter())
        scheduler.complete_step(ended.plan, ended.result)
    gaps = [late - early for early, late in pairwise(ends[WARM_STEPS - 1 :])]
    kv_tokens = batch * (prompt + WARM_STEPS + len(gaps) / 2)
    return (1.0, batch, kv_tokens), statistics.median(gaps)


def _fit(samples: list[Sample]) -> tuple[Terms, float]:
    """Returns the law, and by how much it is off on average."""
    fit = LinearFit(3, min_samples=len(samples) + 1, half_life_samples=_FADES_NEVER)
    for terms, seconds in samples:
        fit.observe(terms, seconds)
    errors = [abs(fit.predict(terms) - seconds) / seconds for terms, seconds in samples]
    return fit.coefficients, statistics.mean(errors)


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )


def _draw(numbers: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(vocab_size) for _ in range(count))


if __name__ == "__main__":
    sys.exit(main())
