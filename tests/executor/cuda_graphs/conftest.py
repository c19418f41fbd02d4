"""Captures that are recorded."""

import pytest
import torch
from pagewise_executor import model_runner

from tests.executor.cuda_graphs.fake_captures import FakeCuda


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(records=True)
    fake.put_in_place(monkeypatch)
    # A GPU's results are copied to the host, and the next replay may overwrite them; on the CPU they are the same.
    monkeypatch.setattr(model_runner, "to_host", torch.clone)
    return fake
