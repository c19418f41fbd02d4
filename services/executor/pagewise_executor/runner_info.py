"""Describes what a model runner offers to the scheduler."""

from pagewise_executor.cpu import device_name
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.runner import RunnerInfo


def describe(
    config: SizedConfig, loaded: LoadedModel, pool: KVPool, *, no_grammars: str, max_grammars: int
) -> RunnerInfo:
    """Return what is known once the pool has its size. ``no_grammars``, ``max_grammars``: see ``RunnerInfo``."""
    longest, fits = loaded.max_model_len, pool.num_blocks * config.block_size
    return RunnerInfo(
        model_fingerprint=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        max_model_len=min(fits, longest) if config.max_model_len == "auto" else longest,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        bytes_per_block=pool.bytes_per_block,
        device=device_name(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kernels=loaded.kernels,
        fallback=loaded.fallback,
        no_segments=loaded.no_segments,
        no_grammars=no_grammars,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        max_grammars=max_grammars,
    )
