"""Models with recurrent layers whose weights are all random."""

from pathlib import Path
from typing import Any

import torch
import transformers
from pagewise_executor.models.recurrent import RecurrentLayer
from pagewise_executor.models.trial import try_without_weights
from torch import nn

from tests.model_builders import build_model


def recurrent_model(
    family: str, path: Path, dtype: torch.dtype = torch.float32, **settings: object
) -> tuple[Any, list[RecurrentLayer]]:
    build_model(family, path, seed=5, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias", ".D", "conv1d.bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) / 2)
    return model, list(try_without_weights(str(path), model.config, dtype, trust_remote_code=False).recurrent)


class Squared(nn.Module):
    """A norm of a gate that is squared."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.weight = norm, norm.weight

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.norm(x, gate.square())  # type: ignore[no-any-return]
