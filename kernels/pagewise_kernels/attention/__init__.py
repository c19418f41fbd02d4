"""Attention over paged KV: decode and prefill."""

from pagewise_kernels.attention.decode import DecodePlan, decode_attention
from pagewise_kernels.attention.prefill import Chunk, PrefillPlan, StaticPrefillPlan, prefill_attention

__all__ = [
    "Chunk",
    "DecodePlan",
    "PrefillPlan",
    "StaticPrefillPlan",
    "decode_attention",
    "prefill_attention",
]
