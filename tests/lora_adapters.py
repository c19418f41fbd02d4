"""LoRA adapters for tests: made and computed by PEFT."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.adapters import read_adapter
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import Adapter
from peft import LoraConfig, PeftModel, get_peft_model

from tests.core_requests import make_request
from tests.sampling import sampling_params

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@contextmanager
def quietly() -> Iterator[None]:
    """PEFT uses deprecated functions of transformers, and looks for the base model on the hub."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_adapter(model: Path, path: Path, seed: int = 1, **settings: Any) -> Path:
    """Save an adapter of a model, whose weights change the model's outputs. ``settings``: of its configuration."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | settings
    with quietly():
        adapted = get_peft_model(base, LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    with quietly():
        adapted.save_pretrained(path)
    return path


def read(path: Path, name: str = "adapter", max_rank: int = 16) -> Adapter:
    """The adapter in a folder, as a gateway names it."""
    return read_adapter(name, str(path), max_rank)


def with_adapter(adapter: Adapter | None, tokens: list[int], max_tokens: int, name: str, **sampling: object) -> Request:
    """A request as the scheduler makes it."""
    params = sampling_params(**({"temperature": 0.0} | sampling))
    salt = None if adapter is None else adapter_salt(adapter.content, None)
    return make_request(name, tokens, max_tokens, params, adapter=adapter, cache_salt=salt)


def peft_model(model: Path, adapter: Path | None) -> torch.nn.Module:
    """The model as PEFT computes it, in float32."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with quietly():
        return (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of a model, and their log-probabilities."""
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.max()))
    return tokens[len(prompt) :], logprobs
