"""Runners whose steps run by recorded captures."""

from pathlib import Path

from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig

BLOCK = 4
TOKENS = 16
"""Of a step at most, so that all steps run by graphs."""


def build(path: Path, **options: object) -> ModelRunner:
    settings = {"block_size": BLOCK, "num_blocks": 60, "max_num_seqs": 3, "max_num_batched_tokens": TOKENS} | options
    return ModelRunner(
        ExecutorConfig(model=str(path), device="cpu", kernels="triton", profile=False, **settings)  # type: ignore[arg-type]
    )
