"""Requests of given lengths with random tokens, and a model to ask."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 4096
"""That of the demo tokenizer, so that every token has text and streams at once."""


@dataclass
class Work:
    """One request: prompt token ids, and how many tokens to generate."""

    prompt: list[int]
    output: int


WORKLOADS = {
    "unequal": "prompts of 16 to 512 tokens (log-uniform), outputs of 16 to 256",
    "equal": "prompts and outputs of 128 tokens",
    "short": "prompts of 64 tokens, outputs of 128",
    "long": "prompts of 512 tokens, outputs of 128",
    "outputs": "prompts of 64 tokens, outputs of 16 to 256",
    "prefix": "prompts that share 512 tokens, as an earlier one did, and have 32 of their own, outputs of 64",
}
_SHARED = 512


def workload(name: str, count: int, seed: int = 0, beside: str = "nothing") -> list[Work]:
    """``count`` requests of one of ``WORKLOADS``. All prompts of another seed, or beside something else, are others, so
    no cache finds them. Lengths depend on the seed alone."""
    lengths, texts = random.Random(f"{name} {seed}"), random.Random(f"{name} {seed} {beside}")
    shared = random_tokens(texts, _SHARED)
    works = []
    for _ in range(count):
        match name:
            case "unequal":
                works.append(Work(random_tokens(texts, int(2 ** lengths.uniform(4, 9))), lengths.randint(16, 256)))
            case "equal":
                works.append(Work(random_tokens(texts, 128), 128))
            case "short":
                works.append(Work(random_tokens(texts, 64), 128))
            case "long":
                works.append(Work(random_tokens(texts, 512), 128))
            case "outputs":
                works.append(Work(random_tokens(texts, 64), lengths.randint(16, 256)))
            case "prefix":
                works.append(Work(shared + random_tokens(texts, 32), 64))
            case _:
                raise ValueError(f"there is no workload {name!r}")
    return works


def earlier(name: str, works: list[Work]) -> list[Work]:
    """The requests that are answered before the clock of such a workload starts: their shared prompt is in use already,
    as the system prompt of an application is. Otherwise a cache of computed prompts finds no hits, because all requests
    come at once."""
    return [Work(works[0].prompt[:_SHARED] + [9] * 32, 1)] if name == "prefix" else []


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids of the demo tokenizer that have text."""
    return [rng.randrange(10, 4000) for _ in range(count)]


_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "49m": ("LlamaConfig", {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 15, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64,
    }),
    # But for their vocabularies, whose tokens need a text each.
    "llama-3.2-1b": ("LlamaConfig", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64,
    }),
    "qwen3-0.6b": ("Qwen3Config", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    }),
}  # fmt: skip
SHAPES = tuple(_SHAPES)


def build_model(path: Path, max_len: int = 4096, shape: str = "49m") -> None:
    """A model of one of ``SHAPES`` with random weights, and the demo model's tokenizer. ``max_len``: its positions."""
    import torch
    import transformers
    from pagewise_shared.model_files import resolve_model

    torch.manual_seed(0)
    kind, sizes = _SHAPES[shape]
    config = getattr(transformers, kind)(
        vocab_size=VOCAB_SIZE, max_position_embeddings=max_len, tie_word_embeddings=True, **sizes
    )
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config)
    generation: Any = transformers.GenerationConfig
    model.generation_config = generation(bos_token_id=0, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("pagewise-demo") / name, path / name)
