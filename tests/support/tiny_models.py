"""Small random models in Hugging Face layout, with a working tokenizer, made on the spot."""

import json
from pathlib import Path

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


def make_tiny_llama(folder: Path, **over: object) -> Path:
    """Writes a tiny Llama; see `_make` for what may be set."""
    return _make(folder, "llama", **over)


def make_tiny_qwen2(folder: Path, **over: object) -> Path:
    """Writes a tiny Qwen2 (query, key and value biases); see `_make` for what may be set."""
    return _make(folder, "qwen2", **over)


def _make(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab: int = 384,
    max_position: int = 2048,
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **config_over: object,
) -> Path:
    """Writes config, weights and tokenizer.

    Args:
        folder: made if absent.
        family: `llama` or `qwen2`.
        seed: of the weights.
        num_layers: and so on, the shape.
        hidden: hidden size.
        heads: query heads.
        kv_heads: key and value heads.
        intermediate: width of the feed-forward part.
        vocab: vocabulary of model and tokenizer, at least 300.
        max_position: longest context.
        is_tied: whether the head is the embedding.
        dtype: of the weights on disk.
        config_over: more fields of config.json, or other values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = hidden // heads
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM" if family == "llama" else "Qwen2ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | config_over
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": EOS_TOKEN_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    tensors = _weights(
        family, seed, num_layers, hidden, head_dim, heads, kv_heads, intermediate, vocab
    )
    if is_tied:
        del tensors["lm_head.weight"]
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    make_tokenizer(folder, vocab)
    return folder


def _weights(
    family: str,
    seed: int,
    num_layers: int,
    hidden: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
) -> dict[str, torch.Tensor]:
    """Draws weights large enough that attention is not flat and greedy text does not stick."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator) * 0.25,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(vocab, hidden, 4.0),
    }
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        for name, num_heads in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            width = num_heads * head_dim
            tensors[f"{layer}.self_attn.{name}.weight"] = draw(width, hidden, 1.5)
            if family == "qwen2":
                bias = torch.randn(width, generator=generator) * 0.3
                tensors[f"{layer}.self_attn.{name}.bias"] = bias
        tensors[f"{layer}.self_attn.o_proj.weight"] = draw(hidden, heads * head_dim, 2.0)
        tensors[f"{layer}.mlp.gate_proj.weight"] = draw(intermediate, hidden, 1.5)
        tensors[f"{layer}.mlp.up_proj.weight"] = draw(intermediate, hidden, 1.5)
        tensors[f"{layer}.mlp.down_proj.weight"] = draw(hidden, intermediate, 1.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            gain = 1 + 0.1 * torch.randn(hidden, generator=generator)
            tensors[f"{layer}.{name}.weight"] = gain
    return tensors
