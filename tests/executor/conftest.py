"""What the executor's tests run on: not OpenVINO, unless they ask for it by name."""

from collections.abc import Iterator

import pytest
from pagewise_executor.models import kernel_choice


@pytest.fixture(scope="session", autouse=True)
def openvino_only_by_name() -> Iterator[None]:
    """``--kernels auto`` depends neither on whether OpenVINO is installed here, nor on this CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "_has_fast_products", lambda: True)
        yield
