"""The interface of models that draft: one attention layer that continues the hidden states of the served model.

A draft model has an entry in its KV for each token of a sequence: entry i is made of the hidden state of token i and of
the embedding of token i + 1, and predicts token i + 2. So its KV has as many entries as the KV of the model, and its
layer is one more layer of the pool: blocks, tiers and peers carry both. The last entry of a block depends on the first
token behind the block. Where a sequence continues a cached prefix by another token, this entry is of the former
continuation. That makes drafts a little worse, and no output wrong.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn


class DraftModel(ABC):
    """A draft model that has been loaded, and that puts hooks into the model that it drafts for.

    ``attention``: its attention module. ``most``: most tokens of a draft. ``most_rows``: with more running sequences it
    is not to be used; 0: measured times alone decide.
    """

    attention: nn.Module
    most: int
    most_rows: int

    def reserve(self, tokens: int) -> None:  # noqa: B027 # a model that takes results of the decoder needs nothing
        """Keep what a step of up to ``tokens`` tokens leaves for ``states`` at places that do not change, to which CUDA
        graphs of such steps write."""

    @abstractmethod
    def watch(self, watched: bool) -> None:
        """Keep the hidden states of the passes that follow for ``states``; or do not, which saves their time."""

    @abstractmethod
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [n, hidden] with which entries begin, of ``tokens`` int64 [n] of the flat batch that
        the model has computed last, while it was watched."""

    @abstractmethod
    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute entries of sequences: ``ids`` [n] of the tokens behind ``positions`` [n], and hidden states [n,
        hidden] of the positions, which may be overwritten.

        Returns hidden states [n, hidden], with which the entries behind a draft begin.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] of the tokens that entries predict, of the results [n, hidden] of ``forward``.

        Tokens that the model cannot draft have -inf.
        """
