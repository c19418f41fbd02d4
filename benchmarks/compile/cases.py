"""The cases that ``run.py`` compiles: every kernel with the shapes and types of the models that are served."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from pagewise_kernels.attention import (
    Chunk,
    DecodePlan,
    PrefillPlan,
    decode_attention,
    decode_latents,
    prefill_attention,
    prefill_latents,
)
from pagewise_kernels.attention.config import TileConfig, decode_configs, latent_groups
from pagewise_kernels.attention.specialised import SPECIALISED, specialised_prefill_attention
from pagewise_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.experts import choose_experts, sum_of_experts
from pagewise_kernels.int4_linear import PackedInt4, int4_linear
from pagewise_kernels.kv_layer import FP8, GROUP, INT4, INT8, RECORD, KVLayer, Scales
from pagewise_kernels.kv_write import write_kv
from pagewise_kernels.logprobs import token_logprobs
from pagewise_kernels.lora import LoraLayer, LoraTiles, add_lora
from pagewise_kernels.matmul import linear
from pagewise_kernels.mxfp4_experts import PackedWeights, sum_of_mxfp4_experts
from pagewise_kernels.penalties import penalise
from pagewise_kernels.quantised import quantise_rows, scaled_linear
from pagewise_kernels.rms_norm import rms_norm, rounded_rms_norm
from pagewise_kernels.rope_write_kv import rope_write_kv
from pagewise_kernels.sampling import SamplingTensors, sample
from pagewise_kernels.segment_move import move_tokens
from pagewise_kernels.silu_mul import silu_mul
from pagewise_kernels.skinny_linear import MOST_ROUNDED_ROWS, skinny_linear

from benchmarks.compile.recurrent_cases import recurrent_cases

_META = torch.device("meta")
CASES: dict[str, Callable[[], None]] = {}
"""By name; each calls public functions with tensors that hold no data."""


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _layer(dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int = 16) -> KVLayer:
    size = head_dim // GROUP * RECORD if dtype == INT4 else head_dim
    pool = _empty(64, block_size, kv_heads, size, dtype=dtype)
    scale = _empty(64, block_size, kv_heads, dtype=torch.float32)
    return KVLayer(pool, pool, Scales(scale, scale) if dtype in (FP8, INT8) else None)


def _attention(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kind: str,
    window: int | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    config: TileConfig | None = None,
    block_size: int = 16,
    sinks: bool = False,
    attention_chunk: int | None = None,
    ring: bool = False,
) -> None:
    layer = _layer(kv_dtype, kv_heads, head_dim, block_size)
    tables = _empty(8, 64, dtype=torch.int32)
    q = _empty(2048, heads, head_dim, dtype=dtype)
    of_heads = _empty(heads, dtype=dtype) if sinks else None
    if kind == "decode":
        plan = DecodePlan(
            max_queries=8, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, device=_META,
            window=window, deterministic=deterministic, max_context=32768, config=config,
            attention_chunk=attention_chunk,
        )  # fmt: skip
        plan.plan(_empty(8, dtype=torch.int32))
        decode_attention(q[:8], layer, tables, plan, softcap=softcap, sinks=of_heads, ring=ring)
        return
    size = 2048 if kind == "prefill" else 12
    chunks = PrefillPlan(
        [Chunk(0, 0, size, 0)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, device=_META,
        window=window, deterministic=deterministic, attention_chunk=attention_chunk,
    )  # fmt: skip
    prefill_attention(q, layer, tables, chunks, softcap=softcap, sinks=of_heads, ring=ring)


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "fp8" if dtype == FP8 else name.replace("bfloat", "bf").replace("float", "fp")


def _add_attention() -> None:
    shapes = {64: (32, 8), 80: (32, 32), 96: (32, 8), 128: (32, 8), 256: (8, 1), 512: (8, 1)}
    types = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32),
             (torch.bfloat16, FP8), (torch.float16, FP8)]  # fmt: skip
    for kind in ("decode", "prefill", "short"):
        for dim, (heads, kv_heads) in shapes.items():
            for dtype, kv_dtype in types:
                if dim in (64, 80, 96, 512) and dtype != torch.bfloat16 and (dim, dtype) != (512, torch.float32):
                    continue
                name = f"{kind} d{dim} {_name(dtype)} kv {_name(kv_dtype)}"
                CASES[name] = partial(_attention, dtype, kv_dtype, heads, kv_heads, dim, kind)
        for dtype in (torch.bfloat16, torch.float32):
            base = partial(_attention, dtype, dtype, 32, 8, 128, kind)
            CASES[f"{kind} d128 {_name(dtype)} window"] = partial(base, window=4096)
            CASES[f"{kind} d256 {_name(dtype)} window softcap"] = partial(
                _attention, dtype, dtype, 8, 4, 256, kind, window=4096, softcap=50.0
            )
            CASES[f"{kind} d128 {_name(dtype)} deterministic"] = partial(base, deterministic=True)
        gpt_oss = partial(_attention, torch.bfloat16, torch.bfloat16, 64, 8, 64, kind, sinks=True)
        CASES[f"{kind} d64 bf16 sinks"] = gpt_oss
        CASES[f"{kind} d64 bf16 sinks window"] = partial(gpt_oss, window=128)
        CASES[f"{kind} d64 bf16 sinks window ring"] = partial(gpt_oss, window=128, ring=True)


def _add_large_tiles() -> None:
    """Shapes whose tiles are so large that the usual configurations spill."""
    bf16 = torch.bfloat16
    for kind in ("decode", "prefill"):
        # The layers of full attention of Gemma 4 26B-A4B: 16 query heads over two KV heads.
        CASES[f"{kind} gemma-4"] = partial(_attention, bf16, bf16, 16, 2, 512, kind)
        CASES[f"{kind} llama-4"] = partial(_attention, bf16, bf16, 40, 8, 128, kind, attention_chunk=8192)
    for kind in ("decode", "prefill"):  # and short chunks as one of them
        gemma = partial(_attention, bf16, bf16, 8, 4, 256, kind, softcap=50.0, deterministic=True)
        CASES[f"{kind} gemma-2 deterministic"] = gemma
        CASES[f"{kind} phi-3 deterministic"] = partial(_attention, bf16, bf16, 32, 32, 96, kind, deterministic=True)
        CASES[f"{kind} falcon-7b"] = partial(_attention, bf16, bf16, 71, 1, 64, kind)


def _add_other_shapes() -> None:
    """Groups that are no power of two, where queries share prefixes; block sizes; float8 in deterministic mode."""
    bf16 = torch.bfloat16
    for kind in ("decode", "prefill"):
        CASES[f"{kind} qwen2-7b"] = partial(_attention, bf16, bf16, 28, 4, 128, kind)
        CASES[f"{kind} d128 bf16 kv fp8 deterministic"] = partial(
            _attention, bf16, FP8, 32, 8, 128, kind, deterministic=True
        )
        CASES[f"{kind} d128 bf16 kv int8"] = partial(_attention, bf16, INT8, 32, 8, 128, kind)
        for dim in (64, 96, 128, 256, 512):
            CASES[f"{kind} d{dim} bf16 kv int4"] = partial(_attention, bf16, INT4, 32, 8, dim, kind)
        CASES[f"{kind} d128 fp16 kv int4"] = partial(_attention, torch.float16, INT4, 32, 8, 128, kind)
        CASES[f"{kind} d128 bf16 kv int4 deterministic"] = partial(
            _attention, bf16, INT4, 32, 8, 128, kind, deterministic=True
        )
        for block_size in (1, 3, 32, 256):
            CASES[f"{kind} d128 bf16 blocks of {block_size}"] = partial(
                _attention, bf16, bf16, 32, 8, 128, kind, block_size=block_size
            )


def _latents(dtype: torch.dtype, heads: int, latent: int, kind: str) -> None:
    keys, q = _empty(64, 16, 1, 64 + latent, dtype=dtype), _empty(2048, heads, 64 + latent, dtype=dtype)
    layer, out = KVLayer(keys, keys[..., 64:]), _empty(2048, heads, latent, dtype=dtype)
    of_plan: dict[str, Any] = {
        "heads": heads, "kv_heads": latent_groups(heads, dtype.itemsize, _META), "head_dim": latent, "rotated": 64,
        "kv_dtype": dtype, "device": _META,
    }  # fmt: skip
    tables = _empty(8, 64, dtype=torch.int32)
    if kind == "decode":
        plan = DecodePlan(max_queries=8, **of_plan)
        plan.plan(_empty(8, dtype=torch.int32))
        decode_latents(q[:8], layer, tables, plan, out=out[:8], scale=0.1)
        return
    prefill_latents(q, layer, tables, PrefillPlan([Chunk(0, 0, 2048, 0)], **of_plan), out=out, scale=0.1)


def _add_latents() -> None:
    """DeepSeek V3, GLM-4.7-Flash and Mistral 4."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for kind, (name, dtype, heads, latent) in product(
        ("decode", "prefill"),
        [
            ("512", bf16, 128, 512),
            ("512 of 20 heads", bf16, 20, 512),
            ("256", bf16, 32, 256),
            ("512 fp32", fp32, 20, 512),
        ],
    ):
        CASES[f"{kind} latents of {name}"] = partial(_latents, dtype, heads, latent, kind)


def _specialised(heads: int, kv_heads: int, head_dim: int, block_size: int = 16) -> None:
    q = _empty(2048, heads, head_dim, dtype=torch.bfloat16)
    plan = PrefillPlan(
        [Chunk(0, 0, 2048, 0)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=torch.bfloat16,
        device=_META, config=SPECIALISED,
    )  # fmt: skip
    specialised_prefill_attention(
        q, _layer(torch.bfloat16, kv_heads, head_dim, block_size), _empty(8, 64, dtype=torch.int32), plan
    )


def _add_specialised() -> None:
    """Kernels of compute capability 9.0 alone."""
    for dim in (64, 128):
        CASES[f"specialised prefill d{dim} bf16"] = partial(_specialised, 32, 8, dim)
    CASES["specialised prefill d128 bf16 groups of 7"] = partial(_specialised, 28, 4, 128)
    CASES["specialised prefill d128 bf16 blocks of 256"] = partial(_specialised, 32, 8, 128, 256)


def _add_sweep() -> None:
    """Variants that benchmarks compare with the default."""
    for config in decode_configs(4)[1:]:
        name = f"decode d128 bf16 tile {config.tile}, {config.num_warps} warps"
        CASES[name] = partial(_attention, torch.bfloat16, torch.bfloat16, 32, 8, 128, "decode", config=config)


def _add_others() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = _name(dtype)
        CASES[f"write_kv {name}"] = partial(_write_kv, dtype, dtype, 8, 128)
        CASES[f"rms_norm {name}"] = partial(_rms_norm, dtype)
        CASES[f"rope_write_kv {name}"] = partial(_rope_write_kv, dtype, dtype)
        CASES[f"silu_mul {name}"] = partial(_silu_mul, dtype)
        CASES[f"linear {name}"] = partial(_linear, dtype)
    for dtype, rows, gated in product((torch.bfloat16, torch.float16, FP8), (1, 16, 64, 256), (False, True)):
        if dtype == FP8 or rows > 1:  # the others have one tile for 1 and for 16 rows
            name = f"skinny_linear {_name(dtype)} rows {rows}{' gated' if gated else ''}"
            CASES[name] = partial(_skinny_linear, dtype, rows, gated)
    CASES["skinny_linear fp8 of fp32 rows 1 gated"] = partial(_skinny_linear, FP8, 1, True, torch.float32)
    for tokens in (1, 64, 1024, 4096):
        CASES[f"experts bf16 tokens {tokens}"] = partial(_experts, torch.bfloat16, tokens)
    for dtype in (torch.float16, torch.float32):
        CASES[f"experts {_name(dtype)} tokens 4096"] = partial(_experts, dtype, 4096)
    for tokens in (64, 256, 4096):
        CASES[f"mxfp4 experts bf16 tokens {tokens}"] = partial(_mxfp4_experts, torch.bfloat16, tokens)
    for dtype in (torch.float16, torch.float32):
        CASES[f"mxfp4 experts {_name(dtype)} tokens 4096"] = partial(_mxfp4_experts, dtype, 4096)
    for dtype, group, rows in (
        *((torch.bfloat16, 128, rows) for rows in (16, 128, 1024)),
        (torch.bfloat16, 32, 16), (torch.float16, 64, 128), (torch.float32, 128, 16),
    ):  # fmt: skip
        CASES[f"int4_linear {_name(dtype)} groups {group} rows {rows}"] = partial(_int4_linear, dtype, group, rows)
    CASES["rms_norm bf16 rounded"] = _rounded_rms_norm
    CASES["write_kv bf16 kv fp8"] = partial(_write_kv, torch.bfloat16, FP8, 8, 128)
    CASES["rope_write_kv bf16 kv fp8"] = partial(_rope_write_kv, torch.bfloat16, FP8)
    CASES["write_kv bf16 kv int8"] = partial(_write_kv, torch.bfloat16, INT8, 8, 128)
    CASES["rope_write_kv bf16 kv int8"] = partial(_rope_write_kv, torch.bfloat16, INT8)
    CASES["write_kv bf16 kv int4"] = partial(_write_kv, torch.bfloat16, INT4, 8, 128)
    CASES["rope_write_kv bf16 kv int4"] = partial(_rope_write_kv, torch.bfloat16, INT4)
    CASES["write_kv fp16 d80"] = partial(_write_kv, torch.float16, torch.float16, 32, 80)
    CASES["blocks"] = _blocks
    for dtype in (torch.bfloat16, torch.float32):
        CASES[f"move_tokens {_name(dtype)}"] = partial(_move_tokens, dtype, 128)
    CASES["move_tokens bf16 interleaved"] = partial(_move_tokens, torch.bfloat16, 64, interleaved=True)
    CASES["move_tokens kv fp8"] = partial(_move_tokens, FP8, 128)
    CASES["move_tokens kv int8"] = partial(_move_tokens, INT8, 128)
    CASES["decode_inputs"] = _decode_inputs
    for rank, rows in ((16, 16), (16, 64), (64, 16), (256, 64)):
        CASES[f"lora r{rank} bf16 rows {rows}"] = partial(_lora, torch.bfloat16, rank, rows)
    CASES["lora r16 fp32 rows 16"] = partial(_lora, torch.float32, 16, 16)
    CASES["lora r64 fp32 rows 64"] = partial(_lora, torch.float32, 64, 64)
    for dtype in (torch.bfloat16, torch.float32):
        CASES[f"sample {_name(dtype)}"] = partial(_sample, dtype)
    for weights, eight_bits, block, rows in (
        (FP8, True, None, 16), (FP8, True, None, 128), (FP8, True, (128, 128), 16), (FP8, True, (128, 128), 128),
        (torch.int8, True, None, 128), (FP8, False, None, 128), (torch.int8, False, (1, 128), 16),
        # The smallest runs of inputs that may share a scale.
        (FP8, True, (16, 32), 16), (torch.int8, True, (16, 32), 16), (torch.int8, False, (1, 16), 16),
    ):  # fmt: skip
        # Without products of float8 its weights are computed as bits, also where there is no float8.
        name = _name(weights) if eight_bits else f"{_name(weights).replace('fp8', 'e4m3')} inputs bf16"
        CASES[f"scaled_linear {name} blocks {block} rows {rows}"] = partial(
            _scaled_linear, weights, eight_bits, block, rows
        )


def _write_kv(dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, head_dim: int) -> None:
    new = _empty(64, heads, head_dim, dtype=dtype)
    write_kv(new, new, _layer(kv_dtype, heads, head_dim), _empty(64, dtype=torch.int64))


def _move_tokens(kv_dtype: torch.dtype, rotary_dim: int, *, interleaved: bool = False) -> None:
    slots, angles = _empty(64, dtype=torch.int64), _empty(64, rotary_dim // 2, dtype=torch.float32)
    move_tokens(_layer(kv_dtype, 8, 128), slots, slots, angles, angles, interleaved=interleaved)


def _rms_norm(dtype: torch.dtype) -> None:
    x = _empty(64, 4096, dtype=dtype)
    rms_norm(x, _empty(4096, dtype=dtype), 1e-6)
    rms_norm(x, _empty(4096, dtype=dtype), 1e-6, residual=x)


def _rope_write_kv(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    angles, ids = _empty(4096, 64, dtype=dtype), _empty(64, dtype=torch.int64)
    layer = _layer(kv_dtype, 8, 128)
    for norm in (None, _empty(40, 128, dtype=dtype)):
        qkv = _empty(64, 48, 128, dtype=dtype)
        rope_write_kv(qkv, ids, angles, angles, layer, ids, head_norm=norm, eps=1e-6)


def _silu_mul(dtype: torch.dtype) -> None:
    silu_mul(_empty(64, 28672, dtype=dtype))


def _linear(dtype: torch.dtype) -> None:
    linear(_empty(100, 4096, dtype=dtype), _empty(6144, 4096, dtype=dtype), _empty(6144, dtype=dtype))


def _skinny_linear(dtype: torch.dtype, rows: int, gated: bool, of_x: torch.dtype = torch.bfloat16) -> None:
    """Gate and up, or down, of the shape of Llama 3 8B."""
    ins, outs = (4096, 28672) if gated else (14336, 4096)
    weight = _empty(outs, ins, dtype=dtype)
    if dtype == FP8:
        scales, x_scales = (_empty(size, dtype=torch.float32) for size in (outs, rows))
        x = _empty(rows, ins, dtype=of_x)
        if rows <= MOST_ROUNDED_ROWS:
            skinny_linear(x, weight, weight_scales=scales, gated=gated)
        else:
            skinny_linear(x.to(FP8), weight, x_scales=x_scales, weight_scales=scales, gated=gated, dtype=x.dtype)
    else:
        skinny_linear(_empty(rows, ins, dtype=dtype), weight, gated=gated)


def _experts(dtype: torch.dtype, tokens: int) -> None:
    """A layer of Qwen3-30B-A3B."""
    weights, chosen = choose_experts(_empty(tokens, 128, dtype=dtype), 8, normalise=True)
    gate_up, down = _empty(128, 1536, 2048, dtype=dtype), _empty(128, 2048, 768, dtype=dtype)
    sum_of_experts(_empty(tokens, 2048, dtype=dtype), gate_up, down, chosen, weights)


def _mxfp4_experts(dtype: torch.dtype, tokens: int) -> None:
    """A layer of gpt-oss-20b."""

    def packed(outs: int, ins: int) -> PackedWeights:
        turns = -(-ins // 128)
        codes, scales = _empty(32, turns, outs, 32, dtype=torch.int16), _empty(32, turns, outs, dtype=torch.int32)
        return PackedWeights(codes, scales, _empty(32, outs, dtype=dtype), ins)

    x, weights = _empty(tokens, 2880, dtype=dtype), _empty(tokens, 4, dtype=dtype)
    chosen = _empty(tokens, 4, dtype=torch.int32)
    sum_of_mxfp4_experts(x, packed(5760, 2880), packed(2880, 2880), chosen, weights, limit=7.0, alpha=1.702)


def _int4_linear(dtype: torch.dtype, group: int, rows: int) -> None:
    ins, outs = 4096, 6144
    codes = _empty(ins // 128, outs, 32, dtype=torch.int16)
    scales, zeros = (_empty(ins // group, outs, dtype=kind) for kind in (dtype, torch.uint8))
    weight = PackedInt4(codes, scales, zeros if group > 32 else None, None, ins, group)
    int4_linear(_empty(rows, ins, dtype=dtype), weight)


def _rounded_rms_norm() -> None:
    x = _empty(64, 4096, dtype=torch.bfloat16)
    rounded_rms_norm(x, _empty(4096, dtype=torch.bfloat16), 1e-6, residual=x)


def _scaled_linear(weights: torch.dtype, eight_bits: bool, block: tuple[int, int] | None, rows: int) -> None:
    ins, outs = 4096, 6144
    x, group = _empty(rows, ins, dtype=torch.bfloat16), None if block is None else block[1]
    block = (1, ins) if block is None else block
    weight = _empty(outs, ins, dtype=weights)
    scales = _empty(-(-outs // block[0]), -(-ins // block[1]), dtype=torch.float32)
    values, x_scales = quantise_rows(x, weights, group=group) if eight_bits else (x, None)
    scaled_linear(values, x_scales, weight, scales, block, group=group, dtype=torch.bfloat16)


def _lora(dtype: torch.dtype, rank: int, rows: int) -> None:
    tiles = LoraTiles(_empty(8, 3, dtype=torch.int32), _empty(100, dtype=torch.int32), rows)
    ins, outs = 4096, 6144
    for ends in ((4096, 5120, outs), (outs,)):
        a, b = _empty(4, len(ends) * rank, ins, dtype=dtype), _empty(4, outs, rank, dtype=dtype)
        x, y = (_empty(100, size, dtype=dtype) for size in (ins, outs))
        add_lora(x, y, LoraLayer(a, b, ends), tiles)


def _decode_inputs() -> None:
    ints, longs = _empty(8, dtype=torch.int32), _empty(8, dtype=torch.int64)
    tables = _empty(8, 64, dtype=torch.int32)
    for known, ring in ((None, False), (ints, False), (ints, True)):
        decode_inputs(
            ints, ints, tables, longs, block_size=16, ids=longs, positions=longs, slots=longs, known=known, ring=ring
        )


def _blocks() -> None:
    pool, ids = _empty(64, 64, 16, 8, 128, dtype=torch.bfloat16), _empty(8, dtype=torch.int64)
    staged = _empty(8, 64 * 32768, dtype=torch.uint8)
    copy_blocks(pool, _empty(8, 2, dtype=torch.int64))
    gather_blocks(pool, ids, staged)
    scatter_blocks(pool, ids, staged)


def _sample(dtype: torch.dtype) -> None:
    logits, floats = _empty(8, 151936, dtype=dtype), _empty(8, dtype=torch.float32)
    ids = _empty(8, dtype=torch.int64)
    rows = _empty(8, dtype=torch.int32)
    sample(logits, SamplingTensors(floats, rows, floats, floats, ids), rows, ids)
    token_logprobs(logits, ids)
    penalise(
        logits, rows, _empty(8, 151936, dtype=torch.int32),
        _empty(8, 151936, dtype=torch.bool), repetition=floats, presence=floats, frequency=floats,
    )  # fmt: skip


_add_attention()
_add_large_tiles()
_add_other_shapes()
_add_latents()
_add_specialised()
_add_sweep()
_add_others()
CASES.update(recurrent_cases())
