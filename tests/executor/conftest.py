"""What the executor's tests run on: not OpenVINO, unless they ask for it by name."""

from collections.abc import Iterator

import pytest
from pagewise_executor.models import openvino_choice


@pytest.fixture(scope="session", autouse=True)
def openvino_only_by_name() -> Iterator[None]:
    """``--kernels auto`` does not depend on whether OpenVINO is installed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openvino_choice, "is_installed", lambda: False)
        yield
