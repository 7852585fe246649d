"""How large `four_gpus` is: Llama-3-8B's shape on GPUs, or a trial of every part on a CPU."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.byte_tokenizer import make_tokenizer
from benchmarks.serving_load import END_ID
from benchmarks.serving_model import make_model_folder
from benchmarks.shapes import LLAMA_3_8B
from pdserve.config.engine import EngineConfig
from simulation.report import Slo

TINY = LLAMA_3_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests of one kind, at rising rates."""

    prompt_tokens: int
    output_tokens: int
    rates_per_s: tuple[float, ...]
    slo: Slo

    @property
    def name(self) -> str:
        """As in the issue's table."""
        return f"{self.prompt_tokens}/{self.output_tokens}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes of everything."""

    engine: EngineConfig
    """Of a replica of one rank; its model is filled in."""
    exact: EngineConfig
    """One whose tokens do not depend on shapes and batches."""
    loads: Mapping[str, Load]
    """By a word for the length of their prompts."""
    seconds: float
    """Of arrivals at each rate."""
    exact_load: Load
    """For tokens that are compared; one rate."""
    num_exact: int
    """Requests of it."""
    decode_batches: tuple[int, ...]
    decode_prompt: int
    decode_tokens: int
    prefill_prompts: tuple[int, ...]
    end_id: int = END_ID

    def make_folder(self, folder: Path) -> Path:
        """Writes the model's configuration and tokenizer."""
        if self.engine.device == "cuda":
            return make_model_folder(folder)
        return make_tiny_folder(folder)


def make_tiny_folder(folder: Path) -> Path:
    """Writes a model that a CPU computes in no time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    make_tokenizer(int(str(TINY["vocab_size"]))).save(str(folder / "tokenizer.json"))
    return folder


ON_GPUS = Scale(
    engine=EngineConfig(
        model="",
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    ),
    exact=EngineConfig(
        model="",
        load_format="dummy",
        device="cuda",
        dtype="float32",
        deterministic=True,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        # So that it fits beside another's on a GPU: float32 weights take 32 GB.
        kv_cache_memory_bytes=8 << 30,
    ),
    loads={
        "2048": Load(
            prompt_tokens=2048,
            output_tokens=128,
            rates_per_s=(16, 32, 48, 64),
            slo=Slo(ttft_s=0.5, tpot_s=0.02),
        ),
        "8192": Load(
            prompt_tokens=8192,
            output_tokens=128,
            rates_per_s=(4, 8, 12, 16),
            slo=Slo(ttft_s=1.5, tpot_s=0.02),
        ),
        "512": Load(
            prompt_tokens=512,
            output_tokens=512,
            rates_per_s=(20, 40, 60, 80),
            slo=Slo(ttft_s=0.25, tpot_s=0.02),
        ),
    },
    seconds=12.0,
    exact_load=Load(
        prompt_tokens=300, output_tokens=64, rates_per_s=(4,), slo=Slo(ttft_s=9, tpot_s=9)
    ),
    num_exact=24,
    decode_batches=(1, 64, 256),
    decode_prompt=512,
    decode_tokens=128,
    prefill_prompts=(2048, 8192),
)
_TINY_ENGINE = EngineConfig(
    model="",
    load_format="dummy",
    max_num_seqs=16,
    max_num_batched_tokens=128,
    kv_cache_memory_bytes=32 << 20,
)
TRIAL = Scale(
    engine=_TINY_ENGINE,
    exact=_TINY_ENGINE,
    loads={
        word: Load(
            prompt_tokens=prompt,
            output_tokens=output,
            rates_per_s=(2, 4),
            slo=Slo(ttft_s=2, tpot_s=0.2),
        )
        for word, prompt, output in (("2048", 96, 8), ("8192", 200, 8), ("512", 32, 24))
    },
    seconds=2.0,
    exact_load=Load(
        prompt_tokens=60, output_tokens=80, rates_per_s=(4,), slo=Slo(ttft_s=9, tpot_s=9)
    ),
    num_exact=6,
    decode_batches=(1, 4),
    decode_prompt=32,
    decode_tokens=24,
    prefill_prompts=(100,),
    end_id=2048,
)
