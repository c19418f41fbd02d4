"""What compiled kernels may take: bars against regressions, with the pinned Triton, for compute capability 9.0."""

from typing import NamedTuple


class Bar(NamedTuple):
    """``registers`` per thread; ``loops``: instructions of each innermost loop, in the order of the code, or of the
    whole kernel if it has none. A kernel that is launched more than once in a case has a bar for all of its launches.

    ``spilled``: bytes per thread. Each is the most that is allowed, and a few per cent above what was last measured.
    """

    registers: int
    loops: tuple[int, ...]
    spilled: int = 0


BARS: dict[tuple[str, str], Bar] = {
    ("decode d128 bf16 kv bf16", "attention_kernel"): Bar(176, (500, 585)),
    ("prefill d128 bf16 kv bf16", "attention_kernel"): Bar(236, (530, 690)),
    ("rope_write_kv bf16", "rope_write_kv_kernel"): Bar(48, (360,)),
    ("rope_write_kv bf16 kv fp8", "rope_write_kv_kernel"): Bar(56, (495,)),
    ("rms_norm bf16", "rms_norm_kernel"): Bar(58, (480,)),
    ("silu_mul bf16", "silu_mul_kernel"): Bar(34, (280,)),
    ("gated_linear bf16", "gated_linear_kernel"): Bar(100, (230,)),
    ("sample fp32", "filter_kernel"): Bar(128, (74, 74, 157, 133, 74, 250, 335)),
}
"""By the name of a case of ``compile_cases`` and the name of a kernel that it launches."""
