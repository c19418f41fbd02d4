"""What compiled kernels may take: bars against regressions, with the pinned Triton, for compute capability 9.0."""

from typing import NamedTuple


class Bar(NamedTuple):
    """``registers`` per thread; ``loops``: instructions of each innermost loop, in the order of the code.

    ``spilled``: bytes per thread. Each is the most that is allowed, and a few per cent above what was last measured.
    """

    registers: int
    loops: tuple[int, ...]
    spilled: int = 0


BARS: dict[tuple[str, str], Bar] = {
    ("decode d128 bf16 kv bf16", "attention_kernel"): Bar(176, (500, 585)),
    ("prefill d128 bf16 kv bf16", "attention_kernel"): Bar(236, (530, 690)),
}
"""By the name of a case of ``compile_cases`` and the name of a kernel that it launches."""
