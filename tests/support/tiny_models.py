"""Small random models in Hugging Face layout, with a working tokenizer, made on the spot."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
"""Of `<|im_end|>`."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog while the server hands its blocks to another.",
    "One worker computes the prompt and another worker writes the answer, token after token.",
    "Please tell me a short story about a river, a bridge and the people who cross it at night.",
    "user assistant system message hello world what is the answer to this question? 0123456789",
)


def make_tokenizer(folder: Path, vocab_size: int = 384) -> Tokenizer:
    """Trains a byte-level BPE over a few sentences: 3 special tokens, 256 bytes, some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """The shape of a tiny model."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    """None divides the hidden size by the heads."""
    intermediate: int = 128
    vocab: int = 384
    """Of model and tokenizer, at least 300."""
    num_layers: int = 2

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads


def make_tiny_llama(folder: Path, **over: Any) -> Path:
    """Writes a tiny Llama; see `make_tiny` for what may be set."""
    return make_tiny(folder, "llama", **over)


def make_tiny_qwen2(folder: Path, **over: Any) -> Path:
    """Writes a tiny Qwen2 (query, key and value biases); see `make_tiny` for what may be set."""
    return make_tiny(folder, "qwen2", **over)


def make_tiny(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    max_position: int = 2048,
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **over: Any,
) -> Path:
    """Writes config, weights and tokenizer.

    Args:
        folder: made if absent.
        family: a key of `ARCHITECTURES`.
        seed: of the weights.
        max_position: longest context.
        is_tied: whether the head is the embedding.
        dtype: of the weights on disk.
        over: fields of `TinyShape`; other names are fields of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {field.name for field in fields(TinyShape)}
    shape = TinyShape(**{name: value for name, value in over.items() if name in names})
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | {name: value for name, value in over.items() if name not in names}
    if family == "smollm3":
        config["pad_token_id"] = 0
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": EOS_TOKEN_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = _weights(family, shape, generator) | _extra_weights(config, shape, generator)
    if is_tied:
        del tensors["lm_head.weight"]
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    make_tokenizer(folder, shape.vocab)
    return folder


def _weights(family: str, shape: TinyShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draws weights large enough that attention is not flat and greedy text does not stick."""
    hidden, inner = shape.hidden, shape.intermediate

    def draw(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, hidden, generator=generator) * 0.25,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(shape.vocab, hidden, 4.0),
    }
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for name, num_heads in _heads_of(shape).items():
            width = num_heads * shape.dim
            tensors[f"{layer}.self_attn.{name}.weight"] = draw(width, hidden, 1.5)
            if family == "qwen2":
                bias = torch.randn(width, generator=generator) * 0.3
                tensors[f"{layer}.self_attn.{name}.bias"] = bias
        tensors[f"{layer}.self_attn.o_proj.weight"] = draw(hidden, shape.heads * shape.dim, 2.0)
        tensors[f"{layer}.mlp.gate_proj.weight"] = draw(inner, hidden, 1.5)
        tensors[f"{layer}.mlp.up_proj.weight"] = draw(inner, hidden, 1.5)
        tensors[f"{layer}.mlp.down_proj.weight"] = draw(hidden, inner, 1.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            gain = 1 + 0.1 * torch.randn(hidden, generator=generator)
            tensors[f"{layer}.{name}.weight"] = gain
    return tensors


def _extra_weights(
    config: dict[str, object], shape: TinyShape, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draws what only some models have; after the rest, whose values thus stay the same."""
    widths: dict[str, int] = {}
    if config.get("attention_bias"):
        widths |= {f"self_attn.{name}": n * shape.dim for name, n in _heads_of(shape).items()}
        widths["self_attn.o_proj"] = shape.hidden
    if config.get("mlp_bias"):
        widths |= {f"mlp.{name}": shape.intermediate for name in ("gate_proj", "up_proj")}
        widths["mlp.down_proj"] = shape.hidden
    tensors: dict[str, torch.Tensor] = {}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for name, width in widths.items():
            bias = torch.randn(width, generator=generator) * 0.3
            tensors[f"{layer}.{name}.bias"] = bias
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                gain = 1.2 + 0.3 * torch.randn(shape.dim, generator=generator)
                tensors[f"{layer}.self_attn.{name}.weight"] = gain
    return tensors


def _heads_of(shape: TinyShape) -> dict[str, int]:
    return {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
