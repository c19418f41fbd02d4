"""Attention over paged KV: decode and prefill."""

from pagewise_kernels.attention.decode import DecodePlan, decode_attention
from pagewise_kernels.attention.latents import decode_latents, prefill_latents
from pagewise_kernels.attention.prefill import Chunk, PrefillPlan, StaticPrefillPlan, prefill_attention

__all__ = [
    "Chunk",
    "DecodePlan",
    "PrefillPlan",
    "StaticPrefillPlan",
    "decode_attention",
    "decode_latents",
    "prefill_attention",
    "prefill_latents",
]
