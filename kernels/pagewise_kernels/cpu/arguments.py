"""The parameters of the library's functions, as its C files declare them."""

import ctypes

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
FUNCTIONS = {
    "pagewise_rms_norm": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_float, ctypes.c_int, _LONG, _POINTER
    ],
    "pagewise_silu_mul": [_POINTER, _LONG, _POINTER, _LONG, _LONG, ctypes.c_int, _LONG, _POINTER],
    "pagewise_panel": [],
    "pagewise_linear": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER
    ],
    "pagewise_int8_panel": [],
    "pagewise_int8_group": [],
    "pagewise_linear_int8": [
        _POINTER, _LONG, *[_POINTER] * 7, _LONG, _LONG, _LONG, _LONG, _POINTER
    ],
    "pagewise_sizeof_attention": [],
    "pagewise_attend": [_POINTER],
}  # fmt: skip
"""All functions that are called, with their arguments."""


class AttentionArguments(ctypes.Structure):
    """``struct attention`` of attention.h, which paged attention reads its arguments from."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *(
            (name, ctypes.c_int64)
            for name in ("key_block", "key_slot", "key_head", "value_block", "value_slot", "value_head")
        ),
        *((name, ctypes.c_void_p) for name in ("slots", "tables")),
        *(
            (name, ctypes.c_int64)
            for name in ("table_stride", "block_size", "tokens", "decodes", "num_chunks", "num_prefixes")
        ),
        *((name, ctypes.c_void_p) for name in ("rows", "lengths", "chunks", "prefixes", "members")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "bf16", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "head_norm")),
        ("norm_eps", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
    )
