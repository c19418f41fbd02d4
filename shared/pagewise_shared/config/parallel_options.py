"""The options of executors that are several processes, by vLLM's names; ``docs/operations.md`` tells of them."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from pagewise_shared.config.kinds import described
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol.limits import MAX_RANKS

TensorParallel = Annotated[
    int,
    Meta(ge=1, le=MAX_RANKS, extra={"short": "--tensor-parallel-size"}),
    described(
        "processes that hold a part of the model each and compute a step together, on a GPU each: an executor's ranks",
        "N",
        "`--tensor-parallel-size` is the same. `--kv-memory` is that of each rank, `--host-memory` that of all of them "
        "together ([operations.md](operations.md#a-model-larger-than-one-device)).",
    ),
]

REFUSED = {
    "--pipeline-parallel-size": "layers are not divided among devices (pipeline parallelism): use --tensor-parallel N, "
    "which divides each layer among the GPUs of one host",
    "--enable-expert-parallel": "experts are not distributed whole (expert parallelism): use --tensor-parallel N, "
    "which divides each expert among the GPUs of one host",
}
"""Options of vLLM that there are not, and what to use."""

_NOT_WITH_RANKS = {
    "simulate": (True, "--simulate: it runs no model"),
}


def check_parallel(values: Mapping[str, Any]) -> None:
    """Check the values of these options together.

    Raises:
        ConfigError: one does not work with several ranks; the text names it.
    """
    if values.get("tensor_parallel", 1) == 1:
        return
    for name, (value, text) in _NOT_WITH_RANKS.items():
        if values.get(name) == value:
            raise ConfigError(f"--tensor-parallel {values['tensor_parallel']} cannot be used with {text}")
    if values.get("kv_mapping") == "mmu":
        raise ConfigError(f"--tensor-parallel {values['tensor_parallel']} cannot be used with --kv-mapping mmu")
