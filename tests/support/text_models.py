"""Model folders without weights, for tests of text and routing: config, tokenizer, template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "größer schöner naïve café 東京 京都 日本語 🙂🙃 ñandú",
    "one two three four five six seven eight nine ten",
)


def special_tokens() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]


def byte_level_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """GPT-2's kind: 3 special tokens, 256 bytes, merges trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=special_tokens(),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's kind: words with a lower-one-eighth block for the space, bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,!?"]
    merges = []
    for text in ("\u2581t", "he", "\u2581the", "in", "re", "on", "\u2581a"):
        left = text[:-1] if text != "\u2581the" else "\u2581t"
        right = text[len(left) :]
        merges.append((left, right))
        words.append(text)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


def make_text_model(folder: Path, *, max_position: int = 4096, vocab_size: int = 384) -> Path:
    """Writes all that a router reads of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
