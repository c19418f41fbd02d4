"""What the executor's tests run on: not OpenVINO, unless they ask for it by name."""

from collections.abc import Iterator

import pytest
import torch
from pagewise_executor.kernel_checks import run
from pagewise_executor.models import kernel_choice

if not torch.cuda.is_available():
    from tests.interpreter import integers_unchecked, patch_language_once, sum_products_in_order

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


@pytest.fixture(scope="session", autouse=True)
def openvino_only_by_name() -> Iterator[None]:
    """``--kernels auto`` depends neither on whether OpenVINO is installed here, nor on this CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "_has_fast_products", lambda: True)
        yield
