"""For all tests: how kernels run. Each room has its own builders and fakes."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # In Triton's interpreter; it has to be known before anything imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
