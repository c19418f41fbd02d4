"""What ``compile.py`` compiles: every kernel with the shapes and types of the models that are served."""

from collections.abc import Callable
from functools import partial

import torch

from pagewise_kernels.attention import Chunk, DecodePlan, PrefillPlan, Scales, decode_attention, prefill_attention

_META = torch.device("meta")
_FP8 = torch.float8_e4m3fn
CASES: dict[str, Callable[[], None]] = {}
"""By name; each calls public functions with tensors that hold no data."""


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


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
) -> None:
    keys, values = (_empty(64, 16, kv_heads, head_dim, dtype=kv_dtype) for _ in range(2))
    scale = _empty(64, 16, kv_heads, dtype=torch.float32)
    scales = Scales(scale, scale) if kv_dtype == _FP8 else None
    tables = _empty(8, 64, dtype=torch.int32)
    q = _empty(2048, heads, head_dim, dtype=dtype)
    if kind == "decode":
        plan = DecodePlan(
            max_queries=8, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, device=_META,
            window=window, deterministic=deterministic, max_context=32768,
        )  # fmt: skip
        plan.plan(_empty(8, dtype=torch.int32))
        decode_attention(q[:8], keys, values, tables, plan, softcap=softcap, scales=scales)
        return
    size = 2048 if kind == "prefill" else 12
    chunks = PrefillPlan(
        [Chunk(0, 0, size, 0)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, device=_META,
        window=window, deterministic=deterministic,
    )  # fmt: skip
    prefill_attention(q, keys, values, tables, chunks, softcap=softcap, scales=scales)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8").replace("bfloat", "bf").replace("float", "fp")


def _add_attention() -> None:
    shapes = {64: (32, 8), 80: (32, 32), 96: (32, 8), 128: (32, 8), 256: (8, 1)}
    types = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32),
             (torch.bfloat16, _FP8), (torch.float16, _FP8)]  # fmt: skip
    for kind in ("decode", "prefill", "short"):
        for dim, (heads, kv_heads) in shapes.items():
            for dtype, kv_dtype in types:
                if dim in (64, 80, 96) and dtype != torch.bfloat16:
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


_add_attention()
