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
    # Tiles of 64 tokens: without masks, with masks, and the merge of parts.
    ("decode d128 bf16 kv bf16", "attention_kernel"): Bar(250, (325, 600, 320)),
    ("decode d128 bf16 deterministic", "attention_kernel"): Bar(226, (440, 605, 120, 44)),
    ("prefill d128 bf16 deterministic", "attention_kernel"): Bar(232, (440, 605)),
    # Tiles of 128 tokens.
    ("decode d128 bf16 kv fp8", "attention_kernel"): Bar(255, (1450, 2500, 320), spilled=96),
    ("prefill d128 bf16 kv bf16", "attention_kernel"): Bar(255, (650, 990)),
}
"""By the name of a case of ``compile_cases`` and the name of a kernel that it launches."""
