"""Options of how kernels run on a GPU; ``docs/kernels.md`` describes them."""

from typing import Annotated

from pagewise_shared.config.kinds import described

DependentLaunch = Annotated[
    bool,
    described(
        "let a Triton kernel begin while the one before it ends, where the GPU can (compute capability 9.0)",
        more="Results are the same. It takes CUDA 12.3 ([kernels.md](kernels.md#programmatic-dependent-launch)).",
    ),
]
