"""Pairs of float8 values that are converted in registers."""

import triton.language as tl

from pagewise_kernels.launch import called_by_kernels, interpreted

_INTERPRETED = tl.constexpr(interpreted())
_SPLIT = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 low, high;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
"""Pairs (a, b), (c, d), bytes a, b, c, d of a register from the lowest on, become (a, c) and (b, d) in float16."""


@called_by_kernels
def unpack_pairs(pairs, COMPUTE: tl.constexpr):
    """The first and the second values in ``COMPUTE`` of pairs of float8_e4m3fn, which are int16 of any shape.

    Matrix products want values of neighbouring tokens in one register, and KV has neighbouring dimensions next to each
    other. Only elements of 16 bits are transposed when they are loaded from shared memory (``ldmatrix``). So
    values are loaded as pairs, and each half of the dimensions becomes a matrix of its own: three instructions for four
    values. Triton would load each byte by itself, and convert it to bfloat16 with three further instructions.
    """
    if tl.float16 == COMPUTE and not _INTERPRETED:
        first, second = tl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:  # the interpreter knows no machine code, and float32 is not multiplied by such products
        bits = pairs.to(tl.uint16, bitcast=True)
        first = (bits & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
        second = (bits >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    return first, second
