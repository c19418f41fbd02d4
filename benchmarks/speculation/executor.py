"""``pagewise-executor`` that computes the model, and then draws the tokens of the texts in the file ``$TEXTS``.

A request names its text by its seed; requests at temperature 0 get the tokens of the model. So steps take as long as
with the model, while outputs repeat as real ones do, which outputs of a small model or of random weights would not.
"""

import json
import os
import sys
from pathlib import Path

import torch
from pagewise_executor.main import main
from pagewise_executor.sampling.token_sampler import TorchTokenSampler

VARIABLE = "TEXTS"


def draw_texts(texts: list[list[int]]) -> None:
    """Let samplers draw from ``texts``, whole sequences of token ids, the prompt included."""

    def sample(
        self: TorchTokenSampler,
        logits: torch.Tensor,
        rows: list[int],
        positions: torch.Tensor,
        on_device: torch.Tensor | None = None,
    ) -> torch.Tensor:
        drawn = logits.argmax(dim=-1)
        params = [self._params[row] for row in rows]
        told = [
            texts[param.seed][min(position, len(texts[param.seed]) - 1)] if param.temperature > 0 else own
            for param, position, own in zip(params, positions.tolist(), drawn.tolist(), strict=True)
        ]
        return torch.tensor(told, dtype=torch.int64)

    TorchTokenSampler.sample = sample  # type: ignore[method-assign]


if __name__ == "__main__":
    draw_texts(json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8")))
    sys.exit(main())
