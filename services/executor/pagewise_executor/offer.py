"""What an executor offers to the scheduler, as far as its model and its options say it."""

from pagewise_shared.config import ExecutorConfig

from pagewise_executor.cpu import device_name
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.runner import RunnerInfo


def offer(config: ExecutorConfig, loaded: LoadedModel, pool: KVPool, no_grammars: str, max_grammars: int) -> RunnerInfo:
    """Describe an executor of this model and pool. ``no_grammars``, ``max_grammars``: see ``Hello``."""
    return RunnerInfo(
        model_fingerprint=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
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
