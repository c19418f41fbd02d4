"""The base of steps that run by CUDA graphs: static buffers, a ladder of sizes, and the capture of graphs.

Launching the kernels of a step takes longer than the device needs for a small step; a graph is launched at once. A step
is padded up to the next size of which there is a graph.

The graphs of an executor of several ranks have their collectives inside, so all ranks have to replay the same ones in
the same order. They do, because everything that decides it is the same on all of them:

- Whether there are graphs is agreed on (``Ranks.least``): before the first capture of a sort of steps, and after each.
  As soon as one rank fails, all drop the graphs of this sort. A step that is captured does not run, so no rank waits
  for the rank that has failed, and all of them go on with the same steps without graphs.
- Warming up and capturing are one sequence of sorts, sizes and variants, which depends on options and on sizes that
  ranks have agreed on. All collectives have been computed once before a capture, as NCCL needs it.
- Whether a step is replayed, and of which size and variant, follows from these and from the plan, which all ranks get.
"""

import logging
import time
from abc import ABC, abstractmethod
from itertools import product
from typing import Any

import torch
from pagewise_shared.progress import logged_progress

from pagewise_executor.adapters.triton_slots import TritonSlots
from pagewise_executor.collectives import Ranks
from pagewise_executor.graph_capture import captured, waiting_is_an_error, why_failed

log = logging.getLogger(__name__)


class NoGraphsError(RuntimeError):
    """There cannot be graphs of a sort of steps, on none of the ranks: all raise it at the same place."""


class GraphedSteps(ABC):
    """Steps of one sort. ``name``: their name in the log. ``sizes``: the sizes that get a graph, in ascending order.
    ``adapters``: the adapters of the rows, if there are any."""

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
        """Fill the inputs of steps of this size with padding."""

    @abstractmethod
    def record(self, size: int, *, uses: bool) -> None:
        """Compute a step while it is captured, and remember where its results lie; ``uses``: of adapters."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the kernels of steps that run without graphs."""

    def drop(self) -> None:
        """Drop all graphs."""
        self.graphs.clear()

    @property
    def num_graphs(self) -> int:
        """How many graphs there will be."""
        return len(self.sizes) * len(self.variants())

    def variants(self) -> tuple[bool, ...]:
        """Whether steps use adapters: steps without adapters should not pay for them."""
        return (False,) if self.adapters is None else (True, False)

    def use_adapters(self, size: int, *, uses: bool) -> None:
        """The next step uses adapters, or none."""
        if self.adapters is not None:
            self.adapters.prepare_static(size, uses=uses)

    def why_not(self) -> str | None:
        """Return which operation of a step waits for the device; None if none does.

        This runs before a capture, because such an operation is no failure: some mixtures of experts, for instance,
        copy the sizes of their groups to the host. Large steps, small steps and steps with adapters may run different
        code, so each kind runs once.
        """
        for size, uses in product({self.sizes[0]: None, self.sizes[-1]: None}, self.variants()):
            self.clear(size)
            self.use_adapters(size, uses=uses)
            self.compute(size)  # the first call may wait: it compiles and allocates
            torch.cuda.synchronize()
            try:
                with waiting_is_an_error():
                    self.compute(size)
            except RuntimeError as error:
                return f"a step waits for the device ({_first_line(error)})"
        return None

    def capture(self, pool: Any, ranks: Ranks) -> Any:
        """Capture the graphs, the largest first, with memory from ``pool``, and return that; None: a pool of their own.

        Raises:
            NoGraphsError: a capture fails, here or on another rank. RuntimeError: a step fails.
        """
        progress = logged_progress(log, f"{self.name}: capturing", self.num_graphs, "CUDA graphs")
        for size, uses in product(reversed(self.sizes), self.variants()):
            self.clear(size)
            self.use_adapters(size, uses=uses)
            self.compute(size)  # compiles kernels that are not compiled yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            _agree(self._capture_one(graph, size, uses=uses, pool=pool), ranks)
            pool = graph.pool()
            self.graphs[size, uses] = graph
            progress.update()
        return pool

    def _capture_one(self, graph: torch.cuda.CUDAGraph, size: int, *, uses: bool, pool: Any) -> str | None:
        """Capture a step into ``graph``; None. If that fails, return why: nothing of the step has run on the device."""
        try:
            with captured(graph, pool):
                self.record(size, uses=uses)
        except RuntimeError as error:
            return why_failed(error)
        return None


def capture_graphs(ranks: Ranks, *sorts: GraphedSteps) -> bool:
    """Capture the graphs of all ``sorts`` of steps, which share memory: the sort that takes the most comes first.

    This takes seconds. A model that waits for the device cannot be captured, and a capture may fail: then steps of this
    sort run without graphs on all ranks, and the reason is logged. Returns whether all have graphs.

    Raises:
        RuntimeError: a step fails on some ranks only, which are no longer in step with each other.
    """
    pool: Any = None
    failed = 0
    for steps in sorts:
        began = time.perf_counter()
        try:
            _agree_before(steps.why_not(), ranks)
            pool = steps.capture(pool, ranks)
        except RuntimeError as error:
            if not ranks.alone and not isinstance(error, NoGraphsError):
                raise  # others wait for this rank in the middle of a step
            steps.drop()
            reason = str(error) if isinstance(error, NoGraphsError) else why_failed(error)
            log.warning("%s run without CUDA graphs, slower: %s", steps.name, reason)
            failed += 1
            steps.warm_up()
        else:
            seconds = time.perf_counter() - began
            log.info("%s: %d CUDA graphs captured in %.1f s", steps.name, len(steps.graphs), seconds)
    return not failed


def _agree(reason: str | None, ranks: Ranks) -> None:
    """Raise NoGraphsError if this rank or another one has a reason for having no graphs."""
    if not ranks.least(reason is None):
        raise NoGraphsError(reason or "another rank has none")


def _agree_before(reason: str | None, ranks: Ranks) -> None:
    """Raise NoGraphsError if all ranks have a reason. The reason is a property of the model, and has ended a step
    early. A rank without a reason has computed the whole step, and its collectives do not match the collectives of the
    other ranks any more: RuntimeError."""
    possible = ranks.least(reason is None)
    if reason is not None:
        raise NoGraphsError(reason)
    if not possible:
        raise RuntimeError("a step waits for the device on another rank, and not on this one")


def sizes_up_to(most: int, ladder: list[int]) -> list[int]:
    """Return the sizes of a ladder below ``most``, and ``most``."""
    return [*(size for size in ladder if size < most), most]


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
