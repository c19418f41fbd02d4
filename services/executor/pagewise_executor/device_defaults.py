"""Defaults that depend on the device, and the sizes of steps."""

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from pagewise_shared.config import DEFAULT_BATCHED_TOKENS, DEFAULT_NUM_SEQS, ExecutorConfig
from pagewise_shared.cpu_threads import openmp_threads

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Most steps that the scheduler plans ahead."""
_LARGE_MEMORY = 70 * 2**30
_LARGE_MAJOR = 9
_LARGE_NUM_SEQS, _LARGE_BATCHED_TOKENS = 1024, 8192


class Gpu(NamedTuple):
    """A CUDA device: its bytes of memory, and the first number of its compute capability (9 for Hopper)."""

    total_memory: int
    major: int = 9


class SizedConfig(ExecutorConfig, frozen=True, kw_only=True):
    """Options of an executor whose device is known: the limits of its steps are numbers."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def tokens_in_flight(self) -> int:
        """Most tokens that steps in flight compute at the same time."""
        return STEPS_IN_FLIGHT * self.max_num_batched_tokens


def with_threads(config: ExecutorConfig, count: Callable[[], int]) -> ExecutorConfig:
    """Return the options with a number of CPU threads: that of ``--threads``, of the environment, or ``count``."""
    if config.threads != "auto":
        return config
    return msgspec.structs.replace(config, threads=openmp_threads(os.environ) or count())


def with_step_limits(
    config: ExecutorConfig, gpu: Gpu | None, least: Callable[[int], int] = lambda own: own
) -> SizedConfig:
    """Return the options with the limits of steps that they leave to the device. ``gpu``: None on the CPU.

    ``least``: returns the least of the ranks' numbers, so that all ranks get the same limits.

    vLLM's rule for its server: large steps on cards of 70 GiB and more, but not on an A100, whose steps of 8,192 tokens
    take so long that they cost throughput (vLLM's pull request 17885). The compute capability distinguishes these. More
    sequences than tokens cannot run, so a default of ``max_num_batched_tokens`` is at least ``max_num_seqs``.
    """
    if gpu is None and config.gpu_memory_utilization != ExecutorConfig().gpu_memory_utilization:
        log.warning(
            "--gpu-memory-utilization %g has no effect, because this executor uses no GPU: set the size of the KV pool "
            "with --kv-memory",
            config.gpu_memory_utilization,
        )
    large = least(gpu is not None and gpu.total_memory >= _LARGE_MEMORY and gpu.major >= _LARGE_MAJOR)
    default = _LARGE_BATCHED_TOKENS if large else DEFAULT_BATCHED_TOKENS
    tokens = config.max_num_batched_tokens or max(default, config.max_num_seqs or 0)
    rows = config.max_num_seqs or min(tokens, _LARGE_NUM_SEQS if large else DEFAULT_NUM_SEQS)
    options = msgspec.structs.asdict(config) | {"max_num_seqs": rows, "max_num_batched_tokens": tokens}
    return SizedConfig(**options)
