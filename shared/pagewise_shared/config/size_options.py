"""The options that say how large steps, sequences and the memory of a device may be, by vLLM's names."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from pagewise_shared.config.kinds import Positive, described
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol.limits import MAX_BATCHED_TOKENS

DEFAULT_NUM_SEQS, DEFAULT_BATCHED_TOKENS = 256, 2048
"""The limits of a step where neither an option nor an executor's device says otherwise."""

_BY_DEVICE = "1,024 and 8,192 on GPUs with 70 GiB and compute capability 9.0 or more, as in vLLM"

MaxNumSeqs = Annotated[
    Positive | None,
    described(
        f"maximum number of sequences that run at the same time, per executor (default: {DEFAULT_NUM_SEQS}, or by the "
        "GPU)",
        "N",
        f"Each executor chooses its own by its device, with the token budget: {_BY_DEVICE}. Each sequence needs a "
        "token of the budget: more are refused, or raise a budget that is not given.",
    ),
]
MaxNumBatchedTokens = Annotated[
    Annotated[int, Meta(ge=1, le=MAX_BATCHED_TOKENS)] | None,
    described(
        f"token budget of one step: decodes first, then prefill chunks (default: {DEFAULT_BATCHED_TOKENS}, or by the "
        "GPU)",
        "N",
        "See `--max-num-seqs`.",
    ),
]
MaxModelLen = Annotated[
    Positive | Literal["auto"] | None,
    described(
        "maximum tokens of a sequence, prompt and output; auto: those that fit into the KV pool (default: the model's "
        "own limit)",
        "N",
        "`auto` is never more than the model's own limit either.",
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    Meta(gt=0, le=1),
    described(
        "share of a GPU's memory that an executor may take, for weights, steps and the KV pool",
        "SHARE",
        "Not with `--num-blocks` or `--kv-memory`. Without effect on the CPU, as a warning says.",
    ),
]


def check_step_options(values: dict[str, Any]) -> None:
    """Check that a step has room for a token of every sequence, if both limits were given.

    Raises:
        ConfigError: it has not.
    """
    rows, tokens = values.get("max_num_seqs"), values.get("max_num_batched_tokens")
    if rows is not None and tokens is not None and rows > tokens:
        raise ConfigError(
            f"--max-num-seqs {rows} is more than --max-num-batched-tokens {tokens}: each sequence that runs needs a "
            "token of every step"
        )


def check_pool_options(values: dict[str, Any]) -> None:
    """Check the options of the KV pool's size among those that were given.

    Raises:
        ConfigError: more than one of them was given.
    """
    given = [name for name in ("num_blocks", "kv_memory", "gpu_memory_utilization") if values.get(name) is not None]
    if len(given) > 1:
        first, second = ("--" + name.replace("_", "-") for name in given[:2])
        raise ConfigError(f"{first} and {second} both set the size of the KV pool: give one")
