"""Keys and values in four bits, as Triton kernels write and read them: 16 levels for each 32 numbers of a head.

The format is that of the operations in C (``cpu/kv_int4.h``). A record of ``GROUP`` numbers is five words of 32 bits:
in byte i of the first four words the codes of the numbers i (the low bits) and 16 + i, in the last one the step and the
zero in bfloat16. Kernels take a pool of such records as int32.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.kv_layer import GROUP, RECORD
from pagewise_kernels.launch import called_by_kernels, interpreted

_INTERPRETED = tl.constexpr(interpreted())


def _numbers_of_words() -> str:
    """Return PTX that makes of a word of codes and the word of step and zero eight numbers in bfloat16, which are codes
    i and 4 + i of the word for each i.

    A code in the lowest bits of the mantissa of 128 is a number of 16 bits; minus 128 it is a whole number, which is
    exact, and times the step plus the zero it is rounded once.
    """
    codes = "".join(
        f"shr.b32 code, $8, {4 * i}; lop3.b32 code, code, {0x000F000F}, {0x43004300}, 0xea; "
        "fma.rn.bf16x2 code, code, one, less; fma.rn.bf16x2 code, code, step, zero; "
        f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, code; "
        for i in range(4)
    )
    return (
        f"{{ .reg .b32 code, one, less, step, zero; mov.b32 one, {0x3F803F80}; mov.b32 less, {0xC300C300}; "
        f"prmt.b32 step, $9, 0, 0x1010; prmt.b32 zero, $9, 0, 0x3232; {codes}}}"
    )


_NUMBERS = tl.constexpr(_numbers_of_words())


@triton.jit
def bfloat16_bits(x):
    """The bits of the bfloat16 that is nearest to x, ties to even, in the low half of int32."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int32)


@triton.jit
def store_int4(to, x, there, DIM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write heads x float32 [rows, DIM] to ``to`` [rows], pointers to int32, where they are ``there`` [rows].

    All numbers of a group with a NaN or an infinite number are read as NaN. As in C, the zero may be rounded up, above
    a group of equal numbers, which has the step 0 then.
    """
    ROWS: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [ROWS, DIM // 32, 32])
    zero_bits = bfloat16_bits(tl.min(x, 2))
    zero = (zero_bits << 16).to(tl.float32, bitcast=True)
    step_bits = bfloat16_bits((tl.max(x, 2) - zero) / 15.0)
    step = (step_bits << 16).to(tl.float32, bitcast=True)
    is_flat = step < 1e-37
    step_bits = tl.where(is_flat, 0, step_bits)
    doubt = tl.sum(x - x, 2)
    step_bits = tl.where(doubt == doubt, step_bits, 0x7FC0)
    inverse = tl.where(is_flat, 0.0, 1.0 / tl.where(is_flat, 1.0, step))
    scaled = tl.minimum(tl.maximum((x - zero[:, :, None]) * inverse[:, :, None], 0.0), 15.0)
    codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)
    places = tl.arange(0, 32)
    codes = codes << (places % 4 * 8 + places // 16 * 4)[None, None, :]
    words = tl.sum(tl.sum(tl.reshape(codes, [ROWS, DIM // 32, 2, 4, 4]), 4), 2)
    groups = tl.arange(0, DIM // 32)
    inside = there[:, None] & (groups < HEAD_DIM // 32)[None, :]
    at = to[:, None] + groups[None, :] * 5
    tl.store(at[:, :, None] + tl.arange(0, 4)[None, None, :], words, mask=inside[:, :, None])
    tl.store(at + 4, step_bits | (zero_bits << 16), mask=inside)


@triton.jit
def dimensions(keys, DIM: tl.constexpr):
    """The dimensions [DIM] of a head in the order of ``load_int4``, or in their own for other types."""
    places = tl.arange(0, DIM)
    if keys.dtype.element_ty == tl.int32:
        # Of a word: the codes 0, 4, 1, 5, 2, 6, 3, 7.
        pair = places // 2 % 4
        places = places // 32 * 32 + pair % 2 * 16 + places // 8 % 4 * 4 + places % 2 * 2 + pair // 2
    return places


@called_by_kernels
def load_int4(at, seen, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr):
    """Keys or values in ``COMPUTE`` [tokens, DIM] at ``at`` [tokens], pointers to int32, see ``dimensions``.

    With ``MASKED``, rows of tokens that are not ``seen`` [tokens] are zeros.
    """
    TOKENS: tl.constexpr = at.shape[0]
    groups = tl.arange(0, DIM // 32)
    at = at[:, None] + groups[None, :] * 5
    words_at = at[:, :, None] + tl.arange(0, 4)[None, None, :]
    inside = (groups < HEAD_DIM // 32)[None, :]
    if MASKED:
        inside = inside & seen[:, None]
    if MASKED or HEAD_DIM != DIM:
        words = tl.load(words_at, mask=inside[:, :, None], other=0)
        scales = tl.load(at + 4, mask=inside, other=0)
    else:
        words = tl.load(words_at)
        scales = tl.load(at + 4)
    if tl.bfloat16 == COMPUTE and not _INTERPRETED:
        spread = tl.broadcast_to(scales[:, :, None], [TOKENS, DIM // 32, 4])
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            _NUMBERS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, spread],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        first = tl.join(tl.join(a, c), tl.join(b, d))
        second = tl.join(tl.join(e, g), tl.join(f, h))
        numbers = tl.join(first, second).to(COMPUTE, bitcast=True)
    else:
        places = tl.arange(0, 8)
        codes = (words[:, :, :, None] >> (places // 2 * 4 + places % 2 * 16)[None, None, None, :]) & 15
        step = (scales << 16).to(tl.float32, bitcast=True)[:, :, None, None]
        zero = (scales & -65536).to(tl.float32, bitcast=True)[:, :, None, None]
        numbers = (codes.to(tl.float32) * step + zero).to(COMPUTE)
    return tl.reshape(numbers, [TOKENS, DIM])


def unpack(records: torch.Tensor) -> torch.Tensor:
    """Return the numbers float32 [.., dim] of keys or values in four bits [.., bytes], for checks."""
    parts = records.view(torch.uint8).reshape(*records.shape[:-1], -1, RECORD)
    codes, scales = parts[..., : GROUP // 2], parts[..., GROUP // 2 :].contiguous().view(torch.bfloat16).float()
    numbers = torch.cat([codes & 15, codes >> 4], -1) * scales[..., :1] + scales[..., 1:]
    return torch.flatten(numbers, -2)
