"""Decides what computes a model: OpenVINO, the Triton kernels, the CPU operations in C, or PyTorch."""

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.models import openvino_choice

if TYPE_CHECKING:
    import openvino
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig

log = logging.getLogger(__name__)

Kernels = Literal["torch", "triton", "cpu", "openvino"]


class KernelChoice(NamedTuple):
    """What computes a model.

    ``fallback``: ``--kernels auto`` would have chosen other kernels, but they cannot compute the model; or the CPU
    operations compute, in a narrower variant than this processor runs. ``compiled``: the model as OpenVINO computes it,
    if it does.
    """

    kernels: Kernels
    fallback: bool = False
    compiled: "openvino.CompiledModel | None" = None


def choose_kernels(
    config: ExecutorConfig,
    model: torch.nn.Module,
    text: "LlamaConfig | PretrainedConfig",
    attention: list[torch.nn.Module],
    shapes: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
) -> KernelChoice:
    """Choose the kernels that ``--kernels`` asks for; say in the log which ones, and why.

    The arguments are those of ``LoadedModel``; ``text`` is the model's configuration.

    With ``auto`` these are the first that can compute the model: on a GPU the Triton kernels, on the CPU the operations
    in C, before which comes OpenVINO where it is installed and their matrix products are not faster than oneDNN's; last
    PyTorch, which computes everything.

    Raises:
        ModelError: kernels are asked for by name and cannot compute the model; the text says why.
    """
    if config.quantization != "none" and (flaw := _flaw_of_quantisation(config, device, dtype)):
        raise ModelError(f"--quantization {config.quantization}: {flaw}")
    unfit: list[str] = []
    for kernels in _candidates(config, device):
        compiled = None
        match kernels:
            case "openvino":
                compiled, flaw = openvino_choice.convert(config, model, text, attention, shapes, device)
            case "triton":
                flaw = _flaw_of_triton(device, shapes)
            case "cpu":
                flaw = _flaw_of_cpu_kernels(device, dtype, shapes, int(text.num_attention_heads))
            case "torch":
                flaw = ""
        if not flaw:
            _report(config, kernels, unfit)
            computes = kernels == "cpu" or config.quantization != "none"
            return KernelChoice(kernels, bool(unfit) or (computes and _is_narrower()), compiled)
        if config.kernels != "auto":
            raise ModelError(f"--kernels {kernels}: {flaw}")
        unfit.append(f"{kernels}: {flaw}")
    raise AssertionError("torch computes every model")


def tries_openvino(config: ExecutorConfig, device: torch.device) -> bool:
    """Whether OpenVINO is tried, so that the model has to be one of transformers."""
    return "openvino" in _candidates(config, device) and not openvino_choice.flaw_of_options(config, device)


def with_block_size(config: ExecutorConfig, kernels: Kernels) -> ExecutorConfig:
    """Return the configuration with the block size that these kernels need."""
    if kernels != "openvino" or config.block_size == openvino_choice.BLOCK_SIZE:
        return config
    log.info("blocks of %d tokens, as OpenVINO needs them, not of %d", openvino_choice.BLOCK_SIZE, config.block_size)
    return msgspec.structs.replace(config, block_size=openvino_choice.BLOCK_SIZE)


def _candidates(config: ExecutorConfig, device: torch.device) -> tuple[Kernels, ...]:
    if config.kernels != "auto":
        return (config.kernels,)
    if config.quantization != "none":
        return ("cpu", "torch")
    if device.type != "cpu":
        return ("triton", "torch")
    # Measured (docs/performance.md): with AVX-512, and with a processor kept to AVX2, OpenVINO takes as much CPU time
    # for a token, or more, and four seconds more to start.
    if openvino_choice.is_installed() and not _has_fast_products():
        return ("openvino", "cpu", "torch")
    return ("cpu", "torch")


def _is_narrower() -> bool:
    """Whether the CPU operations, which can be loaded, are slower than those that this processor could run."""
    from pagewise_kernels.cpu.library import load_library

    return load_library().narrower


def _has_fast_products() -> bool:
    from pagewise_kernels.cpu.library import LibraryMissingError, has_fast_products

    try:
        return has_fast_products()
    except LibraryMissingError:
        return False


def _report(config: ExecutorConfig, kernels: Kernels, unfit: list[str]) -> None:
    if config.kernels != "auto":
        log.info("kernels: %s, by --kernels", kernels)
    elif unfit:
        log.warning("kernels: %s, because others cannot compute this: %s", kernels, "; ".join(unfit))
    else:
        log.info("kernels: %s, the first choice on %s", kernels, "a GPU" if kernels == "triton" else "this CPU")


def _flaw_of_quantisation(config: ExecutorConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return why linear layers cannot compute in eight bits; empty if they can."""
    if device.type != "cpu":
        return f"weights in eight bits are for the CPU, not for {device}"
    if config.kernels in ("openvino", "triton") or config.deterministic:
        return f"not with {'--deterministic' if config.deterministic else f'--kernels {config.kernels}'}"
    if dtype != torch.float32:
        return f"the rest of the model computes in float32, not in {str(dtype).removeprefix('torch.')}"
    from pagewise_kernels.cpu.library import LibraryMissingError, load_library

    try:
        load_library()
    except LibraryMissingError as error:
        return str(error)
    return ""


def _flaw_of_triton(device: torch.device, shapes: list[tuple[int, int]]) -> str:
    """Return why the Triton kernels cannot compute a model; empty if they can."""
    try:
        from pagewise_kernels.launch import interpreted
    except ImportError as error:
        return f"Triton is not installed: {error}"
    if device.type == "cpu" and not interpreted():
        return "on the CPU only Triton's interpreter runs them: set TRITON_INTERPRET=1"
    head_dim = max(dim for _, dim in shapes)
    return f"heads of {head_dim} are too large, up to 256 are supported" if head_dim > 256 else ""


def _flaw_of_cpu_kernels(device: torch.device, dtype: torch.dtype, shapes: list[tuple[int, int]], heads: int) -> str:
    """Return why the CPU operations cannot compute a model; empty if they can."""
    if device.type != "cpu":
        return f"they run on the CPU, not on {device}"
    from pagewise_kernels.cpu.attention import MAX_GROUP, MAX_HEAD_DIM
    from pagewise_kernels.cpu.library import LibraryMissingError, load_library, parallel_regions
    from pagewise_kernels.cpu.operations import TYPES

    head_dim, group = max(dim for _, dim in shapes), heads // min(kv_heads for kv_heads, _ in shapes)
    if dtype not in TYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} are too large, up to {MAX_HEAD_DIM} are supported"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, up to {MAX_GROUP} are supported"
    if torch.get_num_threads() > 1 and parallel_regions() is None:
        return "torch's OpenMP runtime has no GOMP_parallel, so they would compute on one thread"
    try:
        load_library()
    except LibraryMissingError as error:
        return str(error)
    return ""
