"""The model below its head, which a CUDA graph computes, while the head computes the logits that a step wants."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ModelBody:
    """The decoder that the ``forward`` of ``model`` calls: from ids and positions to normalised hidden states.

    The number of logits differs from step to step, and the processing of logits differs from family to family: a
    softcap, or a scale. So the model's own code runs behind the graph, and gets the graph's output.
    """

    def __init__(self, model: nn.Module) -> None:
        body = model.get_decoder()  # type: ignore[operator] # not always the base model: OPT's is ``model.decoder``
        assert isinstance(body, nn.Module)
        self._forward = body.forward
        self._output: Any = None
        body.forward = self._run  # a module calls the ``forward`` of its instance

    def compute(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return the output of the body for a flat batch of ids and positions [tokens]."""
        return self._forward(input_ids=ids[None], position_ids=positions[None], use_cache=False)

    @contextmanager
    def computed(self, output: Any) -> Iterator[None]:
        """When the model is called inside, its body returns this output of ``compute``."""
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def _run(self, *args: Any, **named: Any) -> Any:
        return self._output if self._output is not None else self._forward(*args, **named)
