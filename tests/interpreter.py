"""Triton's interpreter in the processes of tests: kernels compute the same there, in half of the time."""

import dataclasses
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import triton.language as tl
from triton.runtime import interpreter


class _Patched:
    """Stands for the patches of one launch, which stay."""

    def restore(self) -> None:
        """Nothing is put back: all kernels of this process are interpreted."""


def patch_language_once() -> None:
    """Replace the functions of Triton's language once per process. Triton does it anew in each call of a function."""
    patch: Callable[[Callable[..., object]], object] = interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    def patch_once(function: types.FunctionType) -> _Patched:
        names = {id(tl): "language", id(tl.core): "core"}
        seen = frozenset(names[id(value)] for value in function.__globals__.values() if id(value) in names)
        if seen not in patched:
            patch(function)
            patched.add(seen)
        return _Patched()

    interpreter._patch_lang = patch_once


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
