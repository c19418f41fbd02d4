"""Decides what computes a model: OpenVINO, the Triton kernels, the CPU operations in C, or PyTorch."""

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.kv.kv_pool import kv_dtype_for
from pagewise_executor.kv.page_tables import physical_memory
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
    if it does, by the number of threads.
    """

    kernels: Kernels
    fallback: bool = False
    compiled: "dict[int, openvino.CompiledModel] | None" = None


class Candidates(NamedTuple):
    """What may compute a model, in order of preference, and why what would have been preferred cannot."""

    kernels: list[Kernels]
    unfit: list[str]


def candidates(
    config: ExecutorConfig,
    text: "LlamaConfig | PretrainedConfig",
    device: torch.device,
    dtype: torch.dtype,
    stored: bool = False,
) -> Candidates:
    """Return the kernels that may compute a model, as far as that is known before its weights are loaded.

    ``text``: the model's configuration. ``stored``: whether its checkpoint is quantised. With ``auto`` these are: on a
    GPU the Triton kernels, on the CPU the operations in C, before which comes OpenVINO where it is installed and their
    matrix products are not faster than oneDNN's; last PyTorch, which computes everything.

    Raises:
        ModelError: an option asks for what cannot be; the text says why.
    """
    if config.quantization != "none" and (flaw := _flaw_of_quantisation(config, device, dtype, stored)):
        raise ModelError(f"--quantization {config.quantization}: {flaw}")
    if stored and (flaw := _flaw_of_eight_bits(config)):
        raise ModelError(f"{config.model}: its weights are quantised, which does not go together {flaw}")
    if config.kv_mapping == "mmu":
        if _wanted(config, device, stored) != ("torch",):
            raise ModelError(f"--kv-mapping mmu needs PyTorch's attention: not with --kernels {config.kernels}")
        physical_memory(device)  # refuses what this machine cannot map
    if config.attention != "auto":
        from pagewise_executor.attention.prefill_choice import refuse_attention

        refuse_attention(config, device)
    found = Candidates([], [])
    for kernels in _wanted(config, device, stored):
        match kernels:
            case "openvino":
                flaw = openvino_choice.flaw_of_options(config, device) or openvino_choice.flaw_of_config(config, text)
            case "triton":
                flaw = _flaw_of_triton(device)
            case "cpu":
                flaw = _flaw_of_cpu_kernels(device, dtype)
            case "torch":
                flaw = ""
        if not flaw:
            found.kernels.append(kernels)
        else:
            found.unfit.append(_flawed(config, kernels, flaw))
    if config.deterministic and "triton" not in found.kernels:
        raise ModelError("--deterministic needs the Triton kernels: a GPU, or TRITON_INTERPRET=1 and --kernels triton")
    kv_dtype_for(config, dtype, found.kernels[0], device)  # refuses what only the Triton kernels have
    return found


def choose_kernels(
    config: ExecutorConfig,
    found: Candidates,
    model: torch.nn.Module,
    text: "LlamaConfig | PretrainedConfig",
    attention: list[torch.nn.Module],
    shapes: list[tuple[int, int]],
) -> KernelChoice:
    """Choose the first of the candidates that can compute a model; say in the log which one, and why.

    The arguments are those of ``LoadedModel``; ``text`` is the model's configuration.

    Raises:
        ModelError: kernels are asked for by name and cannot compute the model; the text says why.
    """
    unfit = list(found.unfit)
    for kernels in found.kernels:
        compiled = None
        match kernels:
            case "openvino":
                compiled, flaw = openvino_choice.convert(config, model, text, attention, shapes)
            case "triton":
                flaw = _flaw_for_triton(shapes)
            case "cpu":
                flaw = _flaw_for_cpu_kernels(shapes, int(text.num_attention_heads))
            case "torch":
                flaw = ""
        if not flaw:
            if config.attention != "auto" and kernels != "triton":
                raise ModelError(f"--attention {config.attention}: it needs the Triton kernels; {'; '.join(unfit)}")
            _report(config, kernels, unfit)
            if kernels == "triton":
                from pagewise_kernels.launch import use_dependent_launch

                use_dependent_launch(config.dependent_launch)
            computes = kernels == "cpu" or (kernels == "torch" and config.quantization == "int8")
            return KernelChoice(kernels, bool(unfit) or (computes and _is_narrower()), compiled)
        unfit.append(_flawed(config, kernels, flaw))
    raise AssertionError("torch computes every model")


def _flawed(config: ExecutorConfig, kernels: Kernels, flaw: str) -> str:
    """Return what to say of kernels that ``auto`` passes over; raise it if they are asked for by name."""
    if config.kernels != "auto":
        raise ModelError(f"--kernels {kernels}: {flaw}")
    return f"{kernels}: {flaw}"


def tries_openvino(config: ExecutorConfig, device: torch.device, stored: bool = False) -> bool:
    """Whether OpenVINO is tried, so that the model has to be one of transformers. ``stored``: see ``candidates``."""
    return "openvino" in _wanted(config, device, stored) and not openvino_choice.flaw_of_options(config, device)


def with_block_size(config: ExecutorConfig, kernels: Kernels) -> ExecutorConfig:
    """Return the configuration with the block size that these kernels need."""
    if kernels != "openvino" or config.block_size == openvino_choice.BLOCK_SIZE:
        return config
    log.info("blocks of %d tokens, as OpenVINO needs them, not of %d", openvino_choice.BLOCK_SIZE, config.block_size)
    return msgspec.structs.replace(config, block_size=openvino_choice.BLOCK_SIZE)


def _wanted(config: ExecutorConfig, device: torch.device, stored: bool) -> tuple[Kernels, ...]:
    if config.kernels != "auto":
        return (config.kernels,)
    if config.kv_mapping == "mmu":
        return ("torch",)
    if device.type != "cpu":
        return ("triton", "torch")
    if config.quantization != "none" or stored:
        return ("cpu", "torch")
    # Measured (docs/performance.md): with AVX-512, and with a processor kept to AVX2, OpenVINO takes as much CPU time
    # for a token, or more, and four seconds more to start.
    if openvino_choice.is_installed() and (fast := _has_fast_products()) is not True:
        return ("openvino", "cpu", "torch") if fast is False else ("cpu", "openvino", "torch")
    return ("cpu", "torch")


def _is_narrower() -> bool:
    """Whether the CPU operations, which can be loaded, are slower than those that this processor could run."""
    from pagewise_kernels.cpu.library import load_library

    return load_library().narrower


def _has_fast_products() -> bool | None:
    """Whether matrix products of the CPU operations are not slower than oneDNN's; None if there are no operations."""
    from pagewise_kernels.cpu.library import has_fast_products

    return None if _flaw_of_library() else has_fast_products()


def _report(config: ExecutorConfig, kernels: Kernels, unfit: list[str]) -> None:
    if config.kernels != "auto":
        log.info("kernels: %s, by --kernels", kernels)
    elif unfit:
        log.warning("kernels: %s, because others cannot compute this: %s", kernels, "; ".join(unfit))
    else:
        log.info("kernels: %s, the first choice on %s", kernels, "a GPU" if kernels == "triton" else "this CPU")


def _flaw_of_eight_bits(config: ExecutorConfig) -> str:
    """Return with which option weights do not stay in eight bits; empty if they do."""
    return (
        "with --deterministic" if config.deterministic else "with --kernels openvino" * (config.kernels == "openvino")
    )


def _flaw_of_quantisation(config: ExecutorConfig, device: torch.device, dtype: torch.dtype, stored: bool) -> str:
    """Return why linear layers cannot be quantised; empty if they can."""
    if stored:
        return "the weights of this checkpoint are quantised already; leave the option out"
    if config.quantization == "fp8":
        return (flaw := _flaw_of_eight_bits(config)) and f"not {flaw}"
    if device.type != "cpu":
        return f"it is for the CPU, not for {device}: take fp8"
    if config.kernels == "triton" or config.deterministic:
        return f"not with {'--deterministic' if config.deterministic else f'--kernels {config.kernels}'}"
    if dtype != torch.float32:
        return f"the rest of the model computes in float32, not in {str(dtype).removeprefix('torch.')}"
    return "" if config.kernels == "openvino" else _flaw_of_library()


def _flaw_of_library() -> str:
    """Return why the library of the CPU operations cannot be loaded; empty if it can."""
    from pagewise_kernels.cpu.library import LibraryMissingError, load_library

    try:
        load_library()
    except LibraryMissingError as error:
        return str(error)
    return ""


def _flaw_of_triton(device: torch.device) -> str:
    """Return why the Triton kernels cannot run; empty if they can."""
    try:
        from pagewise_kernels.launch import device_type
    except ImportError as error:
        return f"Triton is not installed: {error}"
    if device.type == "cpu" and device_type() != "cpu":
        return "on the CPU only Triton's interpreter runs them: set TRITON_INTERPRET=1"
    return ""


def _flaw_for_triton(shapes: list[tuple[int, int]]) -> str:
    """Return why the Triton kernels cannot compute a model; empty if they can."""
    head_dim = max(dim for _, dim in shapes)
    return f"heads of {head_dim} are too large, up to 256 are supported" if head_dim > 256 else ""


def _flaw_of_cpu_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the CPU operations cannot run; empty if they can."""
    if device.type != "cpu":
        return f"they run on the CPU, not on {device}"
    from pagewise_kernels.cpu.library import parallel_regions
    from pagewise_kernels.cpu.operations import TYPES

    if dtype not in TYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    if torch.get_num_threads() > 1 and parallel_regions() is None:
        return "torch's OpenMP runtime has no GOMP_parallel, so they would compute on one thread"
    return _flaw_of_library()


def _flaw_for_cpu_kernels(shapes: list[tuple[int, int]], heads: int) -> str:
    """Return why the CPU operations cannot compute a model; empty if they can."""
    from pagewise_kernels.cpu.attention import MAX_GROUP, MAX_HEAD_DIM

    head_dim, group = max(dim for _, dim in shapes), heads // min(kv_heads for kv_heads, _ in shapes)
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} are too large, up to {MAX_HEAD_DIM} are supported"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, up to {MAX_GROUP} are supported"
    return ""
