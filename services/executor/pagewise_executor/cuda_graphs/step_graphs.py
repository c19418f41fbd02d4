"""Both sorts of steps that CUDA graphs are captured of, which share their memory."""

from typing import NamedTuple

from pagewise_executor.collectives import Ranks
from pagewise_executor.cuda_graphs.decode_graphs import DecodeGraphs
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs
from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs


class StepGraphs(NamedTuple):
    """``decodes``: steps of decodes alone. ``mixed``: steps with chunks, which the engine runs by them."""

    decodes: DecodeGraphs
    mixed: MixedGraphs

    def allocate(self, *, captures: bool) -> None:
        """Allocate the memory that all steps use, before the peak of the largest step is measured.

        ``captures``: graphs will be captured.
        """
        self.decodes.allocate()
        if captures:
            self.mixed.allocate()

    def memory(self, peak: int, tokens: int) -> int:
        """Return the bytes of device memory that all graphs share, beside the static buffers.

        ``peak``: the bytes that the largest step takes, which has so many ``tokens``.
        """
        return peak * min(tokens, self.mixed.sizes[-1]) // tokens

    @property
    def num_graphs(self) -> int:
        """How many graphs there will be."""
        return self.decodes.num_graphs + self.mixed.num_graphs

    def capture(self, ranks: Ranks) -> bool:
        """Capture the graphs with ``capture_graphs``; mixed steps, which take more memory, come first."""
        return capture_graphs(ranks, self.mixed, self.decodes)
