"""The builds of the CPU operations."""

from collections.abc import Iterator

import pytest
import torch
from pagewise_kernels.cpu import library
from pagewise_kernels.cpu.build import Variant

from tests.cpu_kernels import need_cpu_kernels, variants

if not torch.cuda.is_available():
    from tests.interpreter import keep_types, patch_language_once, sum_products_in_order

    keep_types()
    patch_language_once()
    sum_products_in_order()


@pytest.fixture(params=variants(), ids=lambda variant: variant.file)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Variant]:
    """Each build of the library in turn."""
    variant: Variant = request.param
    name = {4: "DEFAULT", 8: "AVX2", 16: "AVX512"}[variant.vec]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": variant.vnni})
    library.load_library.cache_clear()
    need_cpu_kernels()
    if library.load_library().variant != variant:
        pytest.skip(f"{variant.file} has not been built")
    yield variant
    library.load_library.cache_clear()
