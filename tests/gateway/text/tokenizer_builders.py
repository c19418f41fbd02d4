"""Small tokenizers of the three kinds there are."""

import json
from pathlib import Path

import tokenizers
from pagewise_gateway.text.tokenizer import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = ["the quick brown fox jumps over the lazy dog 0123456789", "Grüße, naïve café — 世界 🙂 e\u0301"] * 3


def byte_level_backend(special: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """As in GPT-2 and Llama 3; ids 0 to 2 and ``special`` are special, the last one is an added token that is not."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_special_tokens(list(special))
    backend.add_tokens(["<größe>"])
    return backend


def sentencepiece_backend(strip: bool = True) -> tokenizers.Tokenizer:
    """As in Llama 2, Mistral and Gemma (``strip=False``): ▁ for spaces, byte fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted({character for text in TEXT[:1] for character in text if character != " "} | {"▁", "é", "世"})
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def wordpiece_backend() -> tokenizers.Tokenizer:
    """As in BERT: the text of a token depends on its neighbours."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return backend


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), eos_token_ids=frozenset({0}))


def sentencepiece(strip: bool = True) -> Tokenizer:
    return Tokenizer(sentencepiece_backend(strip))


def wordpiece() -> Tokenizer:
    return Tokenizer(wordpiece_backend())


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|user|>{{ message['role'] }}: {{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{{ suffix }}"
)


def write_model(path: Path, **files: object) -> Path:
    """A model directory with a byte-level tokenizer; ``files`` by stem, as JSON (None leaves one out)."""
    path.mkdir(exist_ok=True)
    byte_level_backend().save(str(path / "tokenizer.json"))
    contents: dict[str, object] = {
        "tokenizer_config": {"eos_token": {"content": "<|end|>"}, "bos_token": "<|user|>"},
        "config": {"eos_token_id": 0},
        **files,
    }
    for stem, content in contents.items():
        if content is not None:
            (path / f"{stem}.json").write_text(json.dumps(content))
    return path
