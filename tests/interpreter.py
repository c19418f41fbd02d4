"""Triton's interpreter in the processes of tests: faster, and with products of matrices whose rows are independent."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Patched:
    """Replaces the patches of one launch, which stay."""

    def restore(self) -> None:
        """Nothing is put back: all kernels of this process are interpreted."""


def patch_language_once() -> None:
    """Replace the functions of Triton's language once per process. Triton does it anew in each call of a function."""
    patch: Callable[[Callable[..., object]], object] = interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    @functools.cache
    def patch_once(function: types.FunctionType) -> _Patched:
        names = {id(tl): "language", id(tl.core): "core"}
        seen = frozenset(names[id(value)] for value in function.__globals__.values() if id(value) in names)
        if seen not in patched:
            patch(function)
            patched.add(seen)
        return _Patched()

    interpreter._patch_lang = patch_once


def keep_types() -> None:
    """Make the types of blocks once per shape. The interpreter makes and checks two of them in each operation."""
    make_block, numpy_type = tl.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, object]] = {}
    numpy_types: dict[str, np.dtype[np.generic]] = {}

    def block_init(self: tl.block_type, element_ty: tl.dtype, shape: list[int]) -> None:
        key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def tensor_init(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(tuple(type.shape) if type.is_block() else ())

    def numpy_type_once(dtype: tl.dtype) -> np.dtype[np.generic]:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    tl.block_type.__init__, tl.tensor.__init__ = block_init, tensor_init
    interpreter._get_np_dtype = numpy_type_once


def sum_products_in_order() -> None:
    """Give ``tl.dot`` a product of matrices in which each element is a sum in the order of the inner dimension.

    The interpreter's own product is NumPy's, of a BLAS library that takes another instruction, and with it another
    order of sums, for the rows that are left over from its own tiles. How many these are depends on the processor: with
    AVX2 a row has other bits at another place of Triton's tile. Kernels that promise independent rows could not be
    tested with that.
    """

    def dot(
        a: interpreter.TensorHandle, b: interpreter.TensorHandle, d: interpreter.TensorHandle, *_: object
    ) -> interpreter.TensorHandle:
        products = np.multiply(a.data[..., :, None], b.data[..., None, :, :], dtype=d.data.dtype, order="C")
        return interpreter.TensorHandle(np.add.reduce(products, axis=-2) + d.data, d.dtype.scalar)

    interpreter.interpreter_builder.create_dot = dot


@contextmanager
def integers_unchecked() -> Iterator[None]:
    """Within it, sums and products of integers are not checked for overflow, which takes a quarter of the time."""
    builder = interpreter.interpreter_builder
    checked = builder.options
    builder.options = dataclasses.replace(checked, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = checked
