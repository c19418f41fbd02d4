"""Decides whether OpenVINO computes a model, and says why it does not."""

import importlib.util
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from transformers import PretrainedConfig

if TYPE_CHECKING:
    import openvino

log = logging.getLogger(__name__)

BLOCK_SIZE = 32
"""Tokens of a block: OpenVINO's attention on the CPU knows no other size."""

_FAMILIES = ("gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3")
"""Those whose greedy tokens the tests compare with those of transformers."""


class NotConvertibleError(Exception):
    """OpenVINO cannot compute a model, or not exactly; the text says why."""


class OpenVINOChoice(NamedTuple):
    """``compiled``: the model if OpenVINO computes it, else None. ``fallback``: it would have, but cannot."""

    compiled: "openvino.CompiledModel | None"
    fallback: bool = False


def choose_openvino(
    config: ExecutorConfig,
    model: torch.nn.Module,
    text: PretrainedConfig,
    attention: list[torch.nn.Module],
    shapes: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
) -> OpenVINOChoice:
    """Convert a model if ``--kernels`` asks for OpenVINO, or lets it be chosen where it is installed.

    The arguments are those of ``LoadedModel``. The model is as transformers made it.

    Raises:
        ModelError: OpenVINO is asked for by name and cannot compute the model; the text says why.
    """
    asked = config.kernels == "openvino"
    if not asked and (config.kernels != "auto" or device.type != "cpu"):
        return OpenVINOChoice(None)
    if not asked and not is_installed():
        return OpenVINOChoice(None)
    refused = why_not(config, model, text, device, dtype)
    if not refused:
        try:
            return OpenVINOChoice(_compile(model, attention, shapes, int(text.vocab_size)))
        except ImportError as error:  # not installed, or another version than those that were tried
            refused = f"it cannot be imported ({error}): pip install 'pagewise[openvino]'"
        except NotConvertibleError as error:
            refused = f"it cannot compute {config.model}: {error}"
    if asked:
        raise ModelError(f"--kernels openvino: {refused}")
    log.warning("OpenVINO is installed but not used, torch computes instead: %s", refused)
    return OpenVINOChoice(None, fallback=True)


def is_installed() -> bool:
    """Whether there is an OpenVINO that could be imported."""
    return importlib.util.find_spec("openvino") is not None


def _compile(
    model: torch.nn.Module, attention: list[torch.nn.Module], shapes: list[tuple[int, int]], vocab_size: int
) -> "openvino.CompiledModel":
    from pagewise_executor.models.openvino_model import compile_model

    compiled = compile_model(model, attention, shapes, vocab_size, torch.get_num_threads())
    log.info("OpenVINO computes the model: it is installed, can, and is faster on a CPU than torch")
    return compiled


def why_not(
    config: ExecutorConfig, model: torch.nn.Module, text: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> str:
    """Return why OpenVINO is not tried with a model; empty if it is."""
    if device.type != "cpu":
        return "it is used on the CPU only (--device cpu)"
    if dtype != torch.float32:
        return f"it is used in float32 only, not in {str(dtype).removeprefix('torch.')}"
    if config.deterministic:
        return "--deterministic needs the Triton kernels"
    if config.kv_dtype != "auto" or config.kv_layout != "layers":
        return "--kv-dtype and --kv-layout need the Triton kernels"
    name = f"{config.model} ({text.model_type})"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} has a softcap in its attention, which OpenVINO's has not"
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        return f"{name} is a mixture of experts, which cannot be converted"
    if text.model_type not in _FAMILIES or not type(model).__module__.startswith("transformers."):
        return f"{name} is none of the families that were tried with it ({', '.join(_FAMILIES)})"
    return ""
