"""The interpreter in which the executor's tests run the Triton kernels where there is no GPU."""

from collections.abc import Iterator

import pytest
import torch
from pagewise_executor.kernel_checks import run

if not torch.cuda.is_available():
    from tests.interpreter import integers_unchecked, keep_types, patch_language_once, sum_products_in_order

    keep_types()
    patch_language_once()
    sum_products_in_order()

    @pytest.fixture(scope="module", autouse=True)
    def kernels_are_checked_in_their_own_tests() -> Iterator[None]:
        """For overflowing integers, among the rest. Here they compute for models of the same sizes, or smaller ones."""
        with integers_unchecked():
            yield


@pytest.fixture(scope="session", autouse=True)
def kernels_are_not_checked_by_each_runner() -> Iterator[None]:
    """That takes a second in the interpreter. ``test_kernel_checks.py`` checks them, also in a real executor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "check_kernels", lambda *_: None)
        yield
