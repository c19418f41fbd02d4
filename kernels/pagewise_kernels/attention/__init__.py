"""Attention over paged KV: decode, prefill and cascade."""

from pagewise_kernels.attention.cascade import CascadePlan, SharedPrefix, cascade_attention
from pagewise_kernels.attention.checks import Scales
from pagewise_kernels.attention.decode import DecodePlan, decode_attention, merge_parts
from pagewise_kernels.attention.prefill import Chunk, PrefillPlan, prefill_attention

__all__ = [
    "CascadePlan",
    "Chunk",
    "DecodePlan",
    "PrefillPlan",
    "Scales",
    "SharedPrefix",
    "cascade_attention",
    "decode_attention",
    "merge_parts",
    "prefill_attention",
]
