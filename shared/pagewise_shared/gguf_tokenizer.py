"""The tokenizer of a model in a GGUF file, as tokenizer.json and the files beside it have it.

transformers makes it of the vocabulary. Where it takes a default, this module sets the value of llama.cpp.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewise_shared.errors import ModelError

TRANSFORMERS = (5, 23)
"""The first version whose tokenizers have been compared with llama.cpp's. Version 5.13 leaves out the first token."""
_DIGITS, _GLM = "smollm", "glm4"
_SPLITS = {
    "dbrx", "deepseek-r1-qwen", "falcon3", "gpt-2", "gpt-4o", "llama-bpe", "llama3", "megrez", "pixtral", "qwen2",
    "qwen35", "smaug-bpe", "tekken", _DIGITS, _GLM,
}  # fmt: skip
"""How byte-level vocabularies split a text into words (tokenizer.ggml.pre), where both have been compared."""


_OF_GLM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The words of GLM-4, a split that transformers does not know by its name."""


def write_tokenizer(folder: Path, file: Path, fields: Mapping[str, Any], vocab_size: int) -> None:
    """Write the tokenizer of ``file`` into a folder, which has a link to it. ``fields``: of the file, except lists.

    Raises:
        ModelError: it cannot be made, or differs from llama.cpp's.
    """
    import transformers

    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind not in ("llama", "gpt2") or (kind == "gpt2" and split not in _SPLITS):
        raise ModelError(
            f"{file}: GGUF files are served with tokenizers of SentencePiece (llama), and byte-level ones that split "
            f"texts like {', '.join(sorted(_SPLITS))}, and this one is {kind}, {split}"
        )
    if tuple(map(int, transformers.__version__.split(".")[:2])) < TRANSFORMERS:
        wanted = ".".join(map(str, TRANSFORMERS))
        raise ModelError(f"{file}: GGUF files need transformers {wanted}, and {transformers.__version__} is installed")
    try:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file.name)  # nosec B615 # a local folder
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of many kinds; an ImportError where torch is not installed
        raise ModelError(f"{file}: its tokenizer cannot be read: {str(error).splitlines()[0]}") from error
    settings = json.loads((folder / "tokenizer.json").read_text())
    # The classes of transformers add special tokens of their own behind the vocabulary, for which there are no weights.
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] < vocab_size]
    if split == _DIGITS:
        words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        digits = {"type": "Digits", "individual_digits": True}
        settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, words]}
    if split == _GLM:
        words = {"type": "Split", "pattern": {"Regex": _OF_GLM}, "behavior": "Isolated", "invert": False}
        as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [words, as_bytes]}
    if (fields["general.architecture"], kind) == ("llama", "llama"):
        _set_spaces(settings, prefix=bool(fields.get("tokenizer.ggml.add_space_prefix", True)))
    (folder / "tokenizer.json").write_text(json.dumps(settings))


def _set_spaces(settings: dict[str, Any], *, prefix: bool) -> None:
    """Let a tokenizer of SentencePiece treat spaces as llama.cpp does, and as the first tokenizers of Llama.

    ``prefix``: a space is added before a text, and behind each added token. transformers adds one before a text alone,
    with every file.
    """
    added = [{"type": "Prepend", "prepend": "\u2581"}] if prefix else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    settings["normalizer"], settings["pre_tokenizer"] = {"type": "Sequence", "normalizers": [*added, replaced]}, None
    if not prefix:
        parts = settings["decoder"]["decoders"]
        settings["decoder"]["decoders"] = [part for part in parts if part["type"] != "Strip"]
