"""Whether OpenVINO can compute a model, and why not. ``kernel_choice`` decides whether it does."""

import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING

import torch
from pagewise_shared.config import ExecutorConfig

from pagewise_executor.kv.kv_pool import free_memory

if TYPE_CHECKING:
    import openvino
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig

# OpenVINO reports to its makers that it was imported, with an id of the machine's user, unless this module is missing.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

VERSIONS = ("2026.4.0", "2026.4.1")
"""Those with which it was tried. Its operation for paged attention is not one that other versions must have."""

BLOCK_SIZE = 32
"""Tokens of a block: OpenVINO's attention on the CPU knows no other size."""

_MOST_OF_MEMORY = 1 / 16
"""The share of the available memory that weights may take once more."""

_FAMILIES = ("gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3")
"""Those whose greedy tokens the tests compare with those of transformers."""


class NotConvertibleError(Exception):
    """OpenVINO cannot compute a model, or not exactly; the text says why."""


def convert(
    config: ExecutorConfig,
    model: torch.nn.Module,
    text: "LlamaConfig | PretrainedConfig",
    attention: list[torch.nn.Module],
    shapes: list[tuple[int, int]],
) -> "tuple[dict[int, openvino.CompiledModel] | None, str]":
    """Return a model as OpenVINO computes it, by the number of threads; or None, and why it cannot.

    The arguments are those of ``choose_kernels``. The model is as transformers made it, and neither ``flaw_of_options``
    nor ``flaw_of_config`` has found anything.
    """
    if not type(model).__module__.startswith("transformers."):
        return None, f"{config.model} is computed by code of its own, which was not tried with it"
    from pagewise_executor.models.openvino_model import compile_model

    eight_bits = config.quantization == "int8"
    weights = sum(weight.nbytes for weight in model.parameters())
    # Small steps may be faster on one thread (``StepThreads``), but what is compiled has packed weights of its own.
    alone = {1} if weights <= _MOST_OF_MEMORY * free_memory(torch.device("cpu")) else set()
    threads = sorted({torch.get_num_threads()} | alone)
    try:
        return compile_model(model, attention, shapes, int(text.vocab_size), threads, eight_bits=eight_bits), ""
    except NotConvertibleError as error:
        return None, f"it cannot compute {config.model}: {error}"


def is_installed() -> bool:
    """Whether there is an OpenVINO that could be imported."""
    return importlib.util.find_spec("openvino") is not None


def flaw_of_options(config: ExecutorConfig, device: torch.device) -> str:
    """Return which option rules OpenVINO out, whatever the model is, or that it is missing; empty if nothing does."""
    if device.type != "cpu":
        return "it is used on the CPU only (--device cpu)"
    if config.dtype not in ("auto", "float32"):
        return f"it is used in float32 only, not in {config.dtype}"
    if config.deterministic:
        return "--deterministic needs the Triton kernels"
    if config.enable_lora:
        return "it does not compute LoRA adapters (--enable-lora)"
    if config.tensor_parallel > 1:
        return "it does not compute parts of a model (--tensor-parallel)"
    if config.kv_dtype != "auto" or config.kv_layout != "layers":
        return "--kv-dtype and --kv-layout need the Triton kernels"
    try:
        if (version := importlib.metadata.version("openvino")) not in VERSIONS:
            return f"it was tried in the versions {' and '.join(VERSIONS)}, and {version} is installed"
        import pagewise_executor.models.openvino_model  # noqa: F401 # what of OpenVINO is used
    except ImportError as error:  # not installed, or another version than those that were tried
        return f"it cannot be imported ({error}): pip install 'pagewise[openvino]'"
    return ""


def flaw_of_config(config: ExecutorConfig, text: "LlamaConfig | PretrainedConfig") -> str:
    """Return why OpenVINO is not tried with a model of this configuration; empty if it is."""
    name = f"{config.model} ({text.model_type})"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} has a softcap in its attention, which OpenVINO's has not"
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        return f"{name} is a mixture of experts, which cannot be converted"
    if text.model_type not in _FAMILIES:
        return f"{name} is none of the families that were tried with it ({', '.join(_FAMILIES)})"
    return ""
