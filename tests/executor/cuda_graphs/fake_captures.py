"""A fake of torch's functions that capture CUDA graphs: what is captured is computed at once, on the CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagewise_executor.cuda_graphs.graphed_steps import GraphedSteps


class FakeCuda:
    """``torch.cuda`` as far as captures go. ``fails_at``: the number of the capture that breaks, from 1 on."""

    def __init__(self) -> None:
        self.mode = "default"
        self.stream = "main"
        self.fails_at = 0
        self.warned = False
        self.captures: list[dict[str, Any]] = []
        self.capturing: FakeGraph | None = None
        self.replayed = 0

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Be ``torch.cuda`` until the patch is undone."""
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", self.set_sync_debug_mode)
        patch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        patch.setattr(torch.cuda, "graph", self.graph)

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode
        if not self.warned:  # as torch does: after the mode has changed
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def graph(self, graph: "FakeGraph", **options: Any) -> "FakeCapture":
        self.captures.append(options)
        return FakeCapture(self, graph, len(self.captures) == self.fails_at)

    def let_replay(self, steps: GraphedSteps, replays: list[tuple[str, int]]) -> None:
        """Let replays of what is captured of ``steps`` compute it again, and add its name and size to ``replays``."""
        record = steps.record

        def remembered(size: int, *, uses: bool) -> None:
            def again() -> None:
                replays.append((steps.name, size))
                record(size, uses=uses)

            assert self.capturing is not None
            self.capturing.again = again
            record(size, uses=uses)

        steps.record = remembered  # type: ignore[method-assign]


class FakeGraph:
    again: Callable[[], None] | None = None

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self._cuda.replayed += 1
        if self.again is not None:
            self.again()


class FakeCapture:
    """A capture that fails does so at its end, and leaves its stream behind, as torch's does."""

    def __init__(self, cuda: FakeCuda, graph: FakeGraph, fails: bool) -> None:
        self._cuda, self._graph, self._fails = cuda, graph, fails

    def __enter__(self) -> None:
        self._cuda.stream = "capture"
        self._cuda.capturing = self._graph

    def __exit__(self, *exception: object) -> None:
        self._cuda.capturing = None
        if self._fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore lines")
        self._cuda.stream = "main"
