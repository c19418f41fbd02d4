"""What an executor offers to the scheduler, as far as its model and its options say it."""

import logging

from pagewise_shared.config.adapter_options import adapter_capacity

from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.devices import device_name
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.runner import RunnerInfo

log = logging.getLogger(__name__)


def offer(config: SizedConfig, loaded: LoadedModel, pool: KVPool, no_grammars: str, max_grammars: int) -> RunnerInfo:
    """Describe an executor of this model and pool, with what its ranks have agreed on, who all call this.

    ``no_grammars``, ``max_grammars``: see ``Hello``.
    """
    longest = loaded.max_model_len
    # A rank that computes in a slower way keeps all the others waiting.
    fallback = not loaded.ranks.least(not loaded.fallback)
    fits = pool.num_blocks * config.block_size if config.max_model_len == "auto" else longest
    return RunnerInfo(
        model_fingerprint=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        max_model_len=min(fits, longest),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        bytes_per_block=pool.bytes_per_block,
        device=device_name(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kernels=loaded.kernels,
        fallback=fallback,
        no_segments=loaded.no_segments,
        no_grammars=no_grammars,
        adapters=adapter_capacity(config),
        max_grammars=max_grammars,
        short_rope_len=loaded.rope.lengths.short_len if loaded.rope.lengths is not None else 0,
    )


def tell_of_pool(info: RunnerInfo) -> None:
    """Say in the log how large the KV pool is, and the steps."""
    log.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB; steps of up to %d tokens and %d sequences of up to %d tokens",
        info.num_blocks,
        info.block_size,
        info.num_blocks * info.bytes_per_block / 2**30,
        info.max_num_batched_tokens,
        info.max_num_seqs,
        info.max_model_len,
    )
    if (holds := info.num_blocks * info.block_size) < info.max_model_len:
        log.warning(
            "the KV pool holds %d tokens, so longer requests are refused, though the model takes %d: --max-model-len "
            "%d tells clients so, and a larger --kv-memory, --quantization or --kv-dtype fp8 leave more room",
            holds,
            info.max_model_len,
            holds,
        )
