"""Limits of compiled kernels against regressions, for compute capability 9.0, by the version of Triton."""

from typing import NamedTuple


class Bar(NamedTuple):
    """``registers`` per thread; ``loops``: instructions of each innermost loop, in the order of the code, or of the
    whole kernel if it has none. A kernel that is launched more than once in a case has a bar for all of its launches.

    ``spilled``: bytes per thread. Each is the greatest allowed number, a few per cent above the last measurement.
    """

    registers: int
    loops: tuple[int, ...]
    spilled: int = 0


Bars = dict[tuple[str, str], Bar]
"""By the name of a case of ``benchmarks/compile/cases.py`` and the name of a kernel that it launches."""

_OF_3_9: Bars = {
    # Tiles of 64 tokens, and the merge of parts. Three programs fit on a multiprocessor with 168 registers.
    ("decode d128 bf16 kv bf16", "decode_attention_kernel"): Bar(168, (405, 385)),
    ("decode d128 bf16 deterministic", "decode_attention_kernel"): Bar(255, (570, 148, 48)),
    ("prefill d128 bf16 deterministic", "attention_kernel"): Bar(255, (465, 685), spilled=84),
    # Tiles of 128 tokens.
    ("decode d128 bf16 kv fp8", "decode_attention_kernel"): Bar(168, (960, 380)),
    ("prefill d128 bf16 kv bf16", "attention_kernel"): Bar(255, (650, 990)),
    # Both consumers with the masks of a tile, which they jump over, the producer, and waits.
    ("specialised prefill d128 bf16", "specialised_prefill_kernel"): Bar(
        168, (3, 745, 3, 3, 750, 375, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3), spilled=48
    ),
    ("rope_write_kv bf16", "rope_write_kv_kernel"): Bar(48, (360,)),
    ("rope_write_kv bf16 kv fp8", "rope_write_kv_kernel"): Bar(56, (495,)),
    ("rms_norm bf16", "rms_norm_kernel"): Bar(58, (480,)),
    ("silu_mul bf16", "silu_mul_kernel"): Bar(34, (280,)),
    ("rms_norm bf16 rounded", "rms_norm_kernel"): Bar(66, (750,)),
    # A turn of the loop reads 16 KiB of the weight, or 32 of gate and up.
    ("skinny_linear bf16 rows 16", "skinny_linear_kernel"): Bar(52, (108,)),
    ("skinny_linear bf16 rows 16 gated", "skinny_linear_kernel"): Bar(76, (157,)),
    ("skinny_linear bf16 rows 64", "skinny_linear_kernel"): Bar(84, (80,)),
    ("skinny_linear bf16 rows 64 gated", "skinny_linear_kernel"): Bar(148, (105,)),
    ("skinny_linear bf16 rows 256", "skinny_linear_kernel"): Bar(144, (86,)),
    ("skinny_linear bf16 rows 256 gated", "skinny_linear_kernel"): Bar(226, (112,)),
    ("skinny_linear fp8 rows 1", "skinny_linear_kernel"): Bar(132, (460, 250)),
    ("skinny_linear fp8 rows 16", "skinny_linear_kernel"): Bar(60, (131,)),
    ("skinny_linear fp8 rows 16 gated", "skinny_linear_kernel"): Bar(84, (195,)),
    ("skinny_linear fp8 rows 64", "skinny_linear_kernel"): Bar(142, (121,)),
    ("skinny_linear fp8 rows 64 gated", "skinny_linear_kernel"): Bar(182, (185,)),
    ("skinny_linear fp8 rows 256", "skinny_linear_kernel"): Bar(222, (163,)),
    ("skinny_linear fp8 rows 256 gated", "skinny_linear_kernel"): Bar(255, (264,)),
    # A turn of the loop reads 16 KiB of the weights, with the largest tile of pairs 32.
    ("experts bf16 tokens 64", "choose_experts_kernel"): Bar(64, (800,)),
    ("experts bf16 tokens 64", "sort_by_expert_kernel"): Bar(68, (35, 660, 20, 64, 430)),
    ("experts bf16 tokens 64", "expert_gate_up_kernel"): Bar(60, (103,)),
    ("experts bf16 tokens 64", "expert_down_kernel"): Bar(68, (103,)),
    ("experts bf16 tokens 1024", "expert_gate_up_kernel"): Bar(68, (75,)),
    ("experts bf16 tokens 1024", "expert_down_kernel"): Bar(84, (75, 115)),
    ("experts bf16 tokens 4096", "expert_gate_up_kernel"): Bar(226, (98,)),
    ("experts bf16 tokens 4096", "expert_down_kernel"): Bar(255, (98, 490)),
    ("sample fp32", "filter_kernel"): Bar(128, (74, 74, 157, 133, 74, 250, 335)),
}

_OF_3_6: Bars = _OF_3_9 | {
    ("decode d128 bf16 kv bf16", "decode_attention_kernel"): Bar(168, (440, 385)),
    ("decode d128 bf16 deterministic", "decode_attention_kernel"): Bar(255, (555, 148, 48)),
    ("prefill d128 bf16 deterministic", "attention_kernel"): Bar(255, (425, 610), spilled=12),
    ("decode d128 bf16 kv fp8", "decode_attention_kernel"): Bar(168, (955, 380), spilled=8),
    ("prefill d128 bf16 kv bf16", "attention_kernel"): Bar(255, (620, 1050), spilled=40),
    ("silu_mul bf16", "silu_mul_kernel"): Bar(34, (290,)),
    ("specialised prefill d128 bf16", "specialised_prefill_kernel"): Bar(
        168, (3, 730, 400, 3, 3, 700, 3, 2, 2, 2, 2, 2, 3, 3, 2, 2, 2, 2, 2), spilled=20
    ),
}

_OF_3_7: Bars = _OF_3_9 | {
    ("decode d128 bf16 kv bf16", "decode_attention_kernel"): Bar(168, (425, 380)),
    ("decode d128 bf16 deterministic", "decode_attention_kernel"): Bar(255, (550, 148, 48)),
    ("prefill d128 bf16 deterministic", "attention_kernel"): Bar(255, (430, 615), spilled=12),
    ("decode d128 bf16 kv fp8", "decode_attention_kernel"): Bar(168, (870, 380)),
    ("decode d128 bf16 kv int8", "decode_attention_kernel"): Bar(168, (1005, 380)),
    ("prefill d128 bf16 kv int8", "attention_kernel"): Bar(255, (780, 935)),
    # Tiles of 64 tokens, of which each number is made in registers.
    ("decode d128 bf16 kv int4", "decode_attention_kernel"): Bar(168, (960, 385)),
    ("prefill d128 bf16 kv int4", "attention_kernel"): Bar(255, (570, 825), spilled=28),
    ("prefill d128 bf16 kv bf16", "attention_kernel"): Bar(255, (640, 1045)),
    ("silu_mul bf16", "silu_mul_kernel"): Bar(34, (295,)),
    # A turn of the loop reads 4 KiB of codes, 8 or 16, which are 2 weights in a byte. Other versions have no bars yet.
    ("mxfp4 experts bf16 tokens 64", "mxfp4_gate_up_kernel"): Bar(66, (335,)),
    ("mxfp4 experts bf16 tokens 64", "mxfp4_down_kernel"): Bar(60, (345,)),
    ("mxfp4 experts bf16 tokens 256", "mxfp4_gate_up_kernel"): Bar(100, (330,)),
    ("mxfp4 experts bf16 tokens 256", "mxfp4_down_kernel"): Bar(124, (332, 112)),
    ("mxfp4 experts bf16 tokens 4096", "mxfp4_gate_up_kernel"): Bar(236, (550,)),
    ("mxfp4 experts bf16 tokens 4096", "mxfp4_down_kernel"): Bar(255, (545, 490)),
    ("int4_linear bf16 groups 128 rows 16", "int4_linear_kernel"): Bar(52, (285,)),
    ("int4_linear bf16 groups 32 rows 16", "int4_linear_kernel"): Bar(52, (315,)),
    ("int4_linear bf16 groups 128 rows 128", "int4_linear_kernel"): Bar(114, (265,)),
    ("int4_linear bf16 groups 128 rows 1024", "int4_linear_kernel"): Bar(255, (445,), spilled=36),
    # A token of a quarter of a head's state, and a chunk of 64 tokens.
    ("gated delta net decode bf16", "step_kernel"): Bar(96, (820,)),
    ("gated delta net chunks bf16", "prepare_kernel"): Bar(244, (132, 250, 100)),
    ("gated delta net chunks bf16", "chunk_kernel"): Bar(216, (690,)),
    ("KDA decode bf16", "step_kernel"): Bar(92, (820,)),
    ("KDA chunks bf16", "prepare_kernel"): Bar(252, (270, 102)),
    ("Mamba-2 decode bf16", "step_kernel"): Bar(76, (820,)),
    ("Mamba-2 chunks bf16", "chunk_kernel"): Bar(255, (1220,)),
    ("specialised prefill d128 bf16", "specialised_prefill_kernel"): Bar(
        168, (3, 730, 420, 3, 3, 730, 3, 2, 2, 2, 2, 2, 3, 3, 2, 2, 2, 2, 2), spilled=28
    ),
}

BARS: dict[str, Bars] = {"3.6": _OF_3_6, "3.7": _OF_3_7, "3.9": _OF_3_9}

MOST_SPILLED = {"3.6": 144, "3.7": 144, "3.9": 96}
"""Bytes per thread: a few values at the edges of a loop, none inside one that matters. Version 3.6 keeps less of float8
KV in registers, and of prefills with seven query heads per KV head."""
MOST_SPILLED_SPECIALISED = 208
"""The same of prefill by specialised warps with seven query heads per KV head, whose rows are divided by it."""
MOST_SPILLED_PREPARED = 576
"""The same of chunks of gated delta nets before Hopper, where both operands of a product are in registers."""
MOST_RELOADED = {"3.6": 22, "3.7": 22, "3.9": 30}
"""Reads of spilled registers in the loops of its consumers, of 1,460 instructions."""
