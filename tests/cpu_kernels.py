"""Whether the CPU operations can be tested here."""

import pytest
from pagewise_kernels.cpu.library import LibraryMissingError, load_library


def kernels_without_openvino() -> str:
    """What ``--kernels auto`` chooses on the CPU for the models of the tests."""
    try:
        load_library()
    except LibraryMissingError:
        return "torch"
    return "cpu"


def need_cpu_kernels() -> None:
    """Skip a test where the library has not been built: ``make setup`` says so if it could not."""
    try:
        load_library()
    except LibraryMissingError as error:
        pytest.skip(str(error))
