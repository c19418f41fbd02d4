"""Chooses the kernels of a model: the Triton kernels, the CPU operations in C, or PyTorch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.registry import Kernels, backend_of, kv_dtype_for, layout_of, named_backends
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint

log = logging.getLogger(__name__)


class Candidates(NamedTuple):
    """The kernels that may compute a model, in order of preference, and the reasons why preferred ones cannot."""

    kernels: list[Kernels]
    unfit: list[str]


def candidates(
    config: ExecutorConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantised: QuantisedCheckpoint | None = None,
) -> Candidates:
    """Return the kernels that may compute a model, as far as that is known before its weights are loaded.

    ``quantised``: how its checkpoint is quantised. With ``auto`` these are the Triton kernels on a GPU, the operations
    in C on the CPU, and last PyTorch, which computes every model.

    Raises:
        ModelError: options cannot be fulfilled.
    """
    stored = quantised is not None and not quantised.in_floats
    if config.quantization != "none" and (error := _error_of_quantisation(config, device, dtype, stored)):
        raise ModelError(f"--quantization {config.quantization}: {error}")
    if stored and config.deterministic:
        raise ModelError(f"{config.model}: its weights are quantised, which does not go together with --deterministic")
    if quantised is not None:
        check_stored(config, device, dtype, quantised)
    if config.attention != "auto":
        from pagewise_executor.attention.prefill_choice import refuse_attention

        refuse_attention(config, device)
    wanted = _wanted(config, device)
    for option, backend in named_backends(config).items():
        if wanted != (backend.kernels,):
            raise ModelError(f"{option} needs --kernels {backend.kernels}: not {' or '.join(wanted)}")
    checks = {"triton": partial(_error_of_triton, device), "cpu": partial(_error_of_cpu_kernels, device, dtype)}
    found = _fitting(config, wanted, [], checks)
    if config.deterministic and "triton" not in found.kernels:
        raise ModelError("--deterministic needs the Triton kernels: a GPU, or TRITON_INTERPRET=1 and --kernels triton")
    backend_class = backend_of(config, found.kernels[0])
    backend_class.check(device)
    kv_dtype_for(config, dtype, backend_class, device)
    layout_of(config, backend_class)
    return found


def check_stored(
    config: ExecutorConfig, device: torch.device, dtype: torch.dtype, quantised: QuantisedCheckpoint
) -> None:
    """Check that weights in the format ``quantised``, of a model or a draft model, can be computed.

    ``dtype``: the type of the rest of the model, on ``device``.

    Raises:
        ModelError: it cannot.
    """
    if quantised.in_blocks and (error := _error_of_cpu_weights(config, device, dtype)):
        raise ModelError(f"{quantised.name}: its weights are in blocks of GGUF, for the CPU in float32: {error}")
    if quantised.four_bits is not None and (error := _error_of_four_bits(config, device, dtype)):
        raise ModelError(f"{quantised.name}: its weights are in four bits: {error}")


def choose_kernels(config: ExecutorConfig, found: Candidates, layers: Sequence[AttentionShape]) -> tuple[Kernels, bool]:
    """Choose the first of the candidates that can compute a model, and log it with the reason.

    ``layers``: the attention of each layer. Returns the kernels, and whether they are a fallback: ``--kernels auto``
    prefers others, which cannot compute the model, or this processor runs a wider variant of the CPU operations.

    Raises:
        ModelError: the kernels that an option names cannot compute the model.
    """
    checks = {"triton": partial(_error_for_triton, layers), "cpu": partial(_error_for_cpu_kernels, layers)}
    fitting, unfit = _fitting(config, found.kernels, found.unfit, checks)
    kernels = fitting[0]
    _report(config, kernels, unfit)
    if kernels == "triton":
        from pagewise_kernels.launch import use_dependent_launch

        use_dependent_launch(config.dependent_launch)
    computes = kernels == "cpu" or (kernels == "torch" and config.quantization in ("int8", "int4"))
    return kernels, bool(unfit) or (computes and _is_narrower())


def _fitting(
    config: ExecutorConfig, wanted: Sequence[Kernels], unfit: list[str], checks: Mapping[str, Callable[[], str]]
) -> Candidates:
    """Return the kernels whose ``checks`` return no error; PyTorch needs no check."""
    found = Candidates([], list(unfit))
    for kernels in wanted:
        error = checks[kernels]() if kernels in checks else ""
        if error and config.kernels != "auto":
            raise ModelError(f"--kernels {kernels}: {error}")
        if error:
            found.unfit.append(f"{kernels}: {error}")
        else:
            found.kernels.append(kernels)
    if not found.kernels:
        raise ModelError(f"{' '.join(named_backends(config))}: {'; '.join(found.unfit)}")
    return found


def _wanted(config: ExecutorConfig, device: torch.device) -> tuple[Kernels, ...]:
    if config.kernels != "auto":
        return (config.kernels,)
    for backend in named_backends(config).values():
        return (backend.kernels,)
    return ("triton" if device.type != "cpu" else "cpu", "torch")


def _is_narrower() -> bool:
    """Return whether this processor could run a wider, faster variant of the CPU operations than the loaded one."""
    from pagewise_kernels.cpu.library import load_library

    return load_library().narrower


def _report(config: ExecutorConfig, kernels: Kernels, unfit: list[str]) -> None:
    if config.kernels != "auto":
        log.info("kernels: %s, by --kernels", kernels)
    elif unfit:
        log.warning("kernels: %s, because others cannot compute this: %s", kernels, "; ".join(unfit))
    else:
        log.info("kernels: %s, the first choice on %s", kernels, "a GPU" if kernels == "triton" else "this CPU")


def _error_of_quantisation(config: ExecutorConfig, device: torch.device, dtype: torch.dtype, stored: bool) -> str:
    if stored:
        return "the weights of this checkpoint are quantised already; leave the option out"
    if config.quantization == "fp8":
        return "not with --deterministic" if config.deterministic else ""
    if config.quantization == "int4":
        return _error_of_four_bits(config, device, dtype)
    if device.type != "cpu":
        return f"it is for the CPU, not for {device}: take fp8 or int4"
    return _error_of_cpu_weights(config, device, dtype)


def _error_of_cpu_weights(config: ExecutorConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the CPU operations cannot compute linear layers with weights in eight or four bits."""
    if device.type != "cpu":
        return f"not on {device}"
    if config.kernels == "triton" or config.deterministic:
        return f"not with {'--deterministic' if config.deterministic else f'--kernels {config.kernels}'}"
    if dtype != torch.float32:
        return f"the rest of the model computes in float32, not in {str(dtype).removeprefix('torch.')}"
    return _error_of_library()


def _error_of_four_bits(config: ExecutorConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return why no kernels compute linear layers in four bits."""
    if device.type == "cpu" and config.kernels != "triton":
        return _error_of_cpu_weights(config, device, dtype)
    if config.deterministic:
        return "not with --deterministic"
    if config.quantization_text is not None:
        return "--quantization-text rounds weights for the CPU operations alone"
    return "" if config.kernels in ("auto", "triton") else f"on {device} not with --kernels {config.kernels}"


def _error_of_library() -> str:
    """Return why the library of the CPU operations cannot be loaded; empty if it can. So do the functions below."""
    from pagewise_kernels.cpu.library import LibraryMissingError, load_library

    try:
        load_library()
    except LibraryMissingError as error:
        return str(error)
    return ""


def _error_of_triton(device: torch.device) -> str:
    try:
        from pagewise_kernels.launch import device_type
    except ImportError as error:
        return f"Triton is not installed: {error}"
    if device.type == "cpu" and device_type() != "cpu":
        return "on the CPU only Triton's interpreter runs them: set TRITON_INTERPRET=1"
    return ""


def _error_for_triton(layers: Sequence[AttentionShape]) -> str:
    from pagewise_kernels.attention.checks import MAX_HEAD_DIM
    from pagewise_kernels.attention.config import LARGEST_TILE
    from pagewise_kernels.attention.latents import MAX_LATENT

    latent = max(layer.latent for layer in layers)
    if latent > MAX_LATENT:
        return f"latents of {latent} are too large, up to {MAX_LATENT} are supported"
    head_dim = max(0 if layer.latent else layer.head_dim for layer in layers)
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} are too large, up to {MAX_HEAD_DIM} are supported"
    chunks = [layer.attention_chunk for layer in layers if layer.attention_chunk]
    if any(chunk % LARGEST_TILE for chunk in chunks):
        return f"attention chunks of {min(chunks)} tokens are no multiple of {LARGEST_TILE}"
    return ""


def _error_of_cpu_kernels(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cpu":
        return f"they run on the CPU, not on {device}"
    from pagewise_kernels.cpu.operations import TYPES

    if dtype not in TYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    return _error_of_library()


def _error_for_cpu_kernels(layers: Sequence[AttentionShape]) -> str:
    from pagewise_kernels.cpu.attention import MAX_GROUP, MAX_HEAD_DIM, MAX_KEY_DIM

    if any(layer.latent > MAX_HEAD_DIM or layer.head_dim > MAX_KEY_DIM for layer in layers if layer.latent):
        return f"latents are too large, up to {MAX_HEAD_DIM} in keys of {MAX_KEY_DIM} are supported"
    head_dim = max(0 if layer.latent else layer.head_dim for layer in layers)
    group = max(layer.heads // layer.kv_heads for layer in layers)
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} are too large, up to {MAX_HEAD_DIM} are supported"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, up to {MAX_GROUP} are supported"
    return ""
