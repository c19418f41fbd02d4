"""Decides what computes logits, samples, and runs decode steps, by the kernels that were chosen for the model."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from pagewise_executor.adapters.adapters import Adapters
from pagewise_executor.attention.mapped_attention import MappedBackend
from pagewise_executor.attention.torch_attention import TorchBackend
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.engines.model_engine import ModelEngine, TorchEngine
from pagewise_executor.kv.kv_pool import kv_dtype_for
from pagewise_executor.kv.page_tables import PhysicalMemory
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.sampling.logprobs import ComputeLogprobs, compute_logprobs
from pagewise_executor.sampling.penalties import Penalties, TorchPenalties, TritonPenalties
from pagewise_executor.sampling.token_sampler import TokenSampler, TorchTokenSampler, TritonTokenSampler

if TYPE_CHECKING:
    from pagewise_executor.attention.prefill_libraries import TriedLibrary
    from pagewise_executor.cuda_graphs.step_graphs import StepGraphs


class EngineChoice(NamedTuple):
    """What computes logits, and samples. ``graphs``: what runs steps of decodes alone, and some of the engine's steps
    with chunks; None if the engine runs all of them."""

    engine: ModelEngine
    token_sampler: TokenSampler
    penalties: Penalties
    compute_logprobs: ComputeLogprobs
    graphs: "StepGraphs | None" = None


def choose_engine(
    config: SizedConfig,
    loaded: LoadedModel,
    memory: PhysicalMemory | None,
    last_tokens: torch.Tensor,
    adapters: Adapters | None,
) -> EngineChoice:
    """Choose by ``loaded.kernels``. Triton kernels are checked before they are used.

    ``memory``: that of the pool if it is mapped. ``last_tokens``: see ``DecodeGraphs``. ``adapters``: of the executor.

    Raises:
        ModelError: a Triton kernel does not work on this device.
    """
    device, vocab_size = loaded.device, loaded.vocab_size
    if loaded.kernels == "triton":
        return _with_triton(config, loaded, last_tokens, adapters)
    engine: ModelEngine
    if loaded.kernels == "cpu":
        from pagewise_executor.attention.cpu_attention import CpuBackend

        engine = TorchEngine(loaded, CpuBackend(), last_tokens, adapters)
    elif loaded.compiled is not None:
        from pagewise_executor.engines.openvino_engine import OpenVINOEngine

        engine = OpenVINOEngine(loaded.compiled, last_tokens, loaded.rope.lengths)
    else:
        attention = TorchBackend(device) if memory is None else MappedBackend(memory, device)
        engine = TorchEngine(loaded, attention, last_tokens, adapters)
    return EngineChoice(engine, TorchTokenSampler(device), TorchPenalties(vocab_size, device), compute_logprobs)


def _with_triton(
    config: SizedConfig, loaded: LoadedModel, last_tokens: torch.Tensor, adapters: Adapters | None
) -> EngineChoice:
    from pagewise_executor.attention.prefill_choice import choose_prefill_library
    from pagewise_executor.attention.prefill_libraries import layer_shapes
    from pagewise_executor.kernel_checks.run import check_kernels

    device = loaded.device
    shapes = layer_shapes(loaded.attention, loaded.shapes, loaded.dtype)
    kv_dtype = kv_dtype_for(config, loaded.dtype, loaded.kernels, device)
    check_kernels(config, loaded, kv_dtype)
    library, is_unfit = choose_prefill_library(config, device, shapes, kv_dtype)
    loaded.fallback |= is_unfit
    return triton_engine(config, loaded, last_tokens, adapters, library)


def triton_engine(
    config: SizedConfig,
    loaded: LoadedModel,
    last_tokens: torch.Tensor,
    adapters: Adapters | None,
    library: "TriedLibrary | None" = None,
) -> EngineChoice:
    """Return what computes by the Triton kernels. ``library``: of attention, see ``TritonBackend``."""
    from pagewise_kernels.logprobs import token_logprobs

    from pagewise_executor.adapters.triton_slots import TritonSlots
    from pagewise_executor.attention.triton_attention import TritonBackend
    from pagewise_executor.cuda_graphs.decode_graphs import DecodeGraphs
    from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs
    from pagewise_executor.cuda_graphs.model_body import ModelBody
    from pagewise_executor.cuda_graphs.step_graphs import StepGraphs

    device, rows = loaded.device, config.max_num_seqs
    backend = TritonBackend(
        device, rows, loaded.max_model_len, config.block_size, deterministic=config.deterministic, library=library
    )
    engine = TorchEngine(loaded, backend, last_tokens, adapters)
    token_sampler = TritonTokenSampler(rows, device)
    slots = adapters.slots if adapters is not None else None
    assert slots is None or isinstance(slots, TritonSlots)
    decodes = DecodeGraphs(
        engine.forward, engine.forward_context, backend, token_sampler, last_tokens, config.block_size, slots
    )
    engine.graphs = mixed = MixedGraphs(
        ModelBody(loaded.model),
        engine.forward,
        engine.forward_context,
        backend,
        last_tokens,
        config.block_size,
        config.max_num_batched_tokens,
        slots,
    )
    penalties = TritonPenalties(rows, loaded.vocab_size, device)
    return EngineChoice(engine, token_sampler, penalties, token_logprobs, StepGraphs(decodes, mixed))
