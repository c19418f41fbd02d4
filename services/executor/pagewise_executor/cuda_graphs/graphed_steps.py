"""What steps that run by CUDA graphs have in common: static buffers, a ladder of sizes, and how graphs are captured.

Launching the kernels of a step takes longer than the device needs for a small step; a graph is launched at once. A step
is padded up to the next size of which there is a graph.
"""

import logging
import time
from abc import ABC, abstractmethod
from itertools import product
from typing import Any

import torch

from pagewise_executor.lora.triton_slots import TritonSlots
from pagewise_executor.sync_debug import waiting_is_an_error

log = logging.getLogger(__name__)


class GraphedSteps(ABC):
    """Steps of one sort. ``name``: what the log calls them. ``sizes``: those that get a graph, in ascending order.
    ``adapters``: those that rows may have."""

    name: str

    def __init__(self, sizes: list[int], adapters: TritonSlots | None) -> None:
        self.sizes = sizes
        self.adapters = adapters
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    @abstractmethod
    def compute(self, size: int) -> object:
        """Compute a step from the static buffers, and return its results."""

    @abstractmethod
    def clear(self, size: int) -> None:
        """Fill what steps of this size read with padding alone."""

    @abstractmethod
    def record(self, size: int, *, uses: bool) -> None:
        """Compute a step while it is captured, and remember where its results lie; ``uses``: of adapters."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the kernels of steps that run without graphs."""

    def drop(self) -> None:
        """Drop all graphs."""
        self.graphs.clear()

    def variants(self) -> tuple[bool, ...]:
        """Whether steps use adapters: those that do not should not pay for them."""
        return (False,) if self.adapters is None else (True, False)

    def use_adapters(self, size: int, *, uses: bool) -> None:
        """The next step uses adapters, or none."""
        if self.adapters is not None:
            self.adapters.prepare_static(size, uses=uses)

    def why_not(self) -> str | None:
        """Return what in a step waits for the device; None if nothing does.

        It is found out before a capture, because it is no failure: some mixtures of experts, for instance, copy the
        sizes of their groups to the host.
        """
        size = self.sizes[0]
        self.clear(size)
        self.use_adapters(size, uses=False)
        self.compute(size)  # the first call may wait: it compiles and allocates
        torch.cuda.synchronize()
        try:
            with waiting_is_an_error():
                self.compute(size)
        except RuntimeError as error:
            return f"a step waits for the device ({_first_line(error)})"
        return None

    def capture(self, pool: Any) -> Any:
        """Capture the graphs, the largest first, with memory from ``pool``, and return that; None: a pool of their own.

        Raises:
            RuntimeError: that fails.
        """
        for size, uses in product(reversed(self.sizes), self.variants()):
            self.clear(size)
            self.use_adapters(size, uses=uses)
            self.compute(size)  # compiles kernels that are not compiled yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Only what this thread does may spoil the capture: those of the host tier use the device as well.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.record(size, uses=uses)
            pool = graph.pool()
            self.graphs[size, uses] = graph
        return pool


def capture_graphs(*sorts: GraphedSteps) -> bool:
    """Capture the graphs of all sorts of steps, those that take the most memory first: they share it.

    This takes seconds. A model that waits for the device cannot be captured, and a capture may fail: then steps of this
    sort run without graphs, and the log says why. Returns whether all have graphs.
    """
    pool: Any = None
    failed = 0
    for steps in sorts:
        began = time.perf_counter()
        stream = torch.cuda.current_stream()
        reason = steps.why_not()
        if reason is None:
            try:
                pool = steps.capture(pool)
            except RuntimeError as error:
                torch.cuda.set_stream(stream)  # a capture that fails may leave its own one behind
                steps.drop()
                reason = f"capturing them failed ({_first_line(error)})"
        if reason is None:
            seconds = time.perf_counter() - began
            log.info("%s: %d CUDA graphs captured in %.1f s", steps.name, len(steps.graphs), seconds)
            continue
        log.warning("%s run without CUDA graphs, slower: %s", steps.name, reason)
        failed += 1
        steps.warm_up()
    return not failed


def sizes_up_to(most: int, ladder: list[int]) -> list[int]:
    """Return the sizes of a ladder below ``most``, and ``most``."""
    return [*(size for size in ladder if size < most), most]


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
