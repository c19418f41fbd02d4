"""A fake of torch's functions that capture CUDA graphs: captured operations are computed at once, on the CPU.

Captures may be recorded. Then a replay repeats the operations of torch and the kernels of the capture in the memory
that they had then, as a device does: nothing of the code around them runs again.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from pagewise_executor.cuda_graphs.graphed_steps import GraphedSteps
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction


class FakeCuda:
    """``torch.cuda`` as far as captures go. ``fails_at``: the number of the capture that breaks, from 1 on.

    ``records``: captures are recorded. ``before_replay``: called before each replay.
    """

    def __init__(self, *, records: bool = False) -> None:
        self.records = records
        self.before_replay: Callable[[], None] = lambda: None
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
        run = InterpretedFunction.run

        def recorded(kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
            if self.capturing is None or self.capturing.recording is None:
                run(kernel, *args, **options)
                return
            with self.capturing.recording.paused():
                run(kernel, *args, **options)
            self.capturing.calls.append(partial(run, kernel, *args, **options))

        patch.setattr(InterpretedFunction, "run", recorded)

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode
        if not self.warned:  # as torch does: after the mode has changed
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def graph(self, graph: "FakeGraph", **options: Any) -> "FakeCapture":
        self.captures.append(options)
        return FakeCapture(self, graph, len(self.captures) == self.fails_at)

    def let_replay(self, steps: GraphedSteps, replays: list[tuple[str, int]]) -> None:
        """Let replays of captured ``steps`` compute them again, and add their name and size to ``replays``."""
        record = steps.record

        def remembered(size: int, *, uses: bool) -> None:
            def again() -> None:
                replays.append((steps.name, size))
                record(size, uses=uses)

            assert self.capturing is not None
            self.capturing.again = again
            record(size, uses=uses)

        steps.record = remembered  # type: ignore[method-assign]


class Recording(TorchDispatchMode):
    """Adds each operation that runs inside to ``calls``, which compute it again into the same memory."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()
        self._calls, self._is_paused = calls, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not recorded."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        results = func(*args, **named)

        def again() -> None:
            for old, new in zip(_tensors(results), _tensors(func(*args, **named)), strict=True):
                if old.data_ptr() != new.data_ptr():  # else it is a view, or changed in place
                    old.copy_(new)

        if not self._is_paused:
            self._calls.append(again)
        return results


def _tensors(results: Any) -> list[torch.Tensor]:
    found = results if isinstance(results, tuple | list) else [results]
    return [each for each in found if isinstance(each, torch.Tensor)]


class FakeGraph:
    again: Callable[[], None] | None = None
    recording: Recording | None = None

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.calls: list[Callable[[], None]] = []

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self._cuda.replayed += 1
        self._cuda.before_replay()
        for call in self.calls:
            call()
        if self.again is not None:
            self.again()


class FakeCapture:
    """A capture that fails does so at its end, and leaves its stream behind, as torch's does."""

    def __init__(self, cuda: FakeCuda, graph: FakeGraph, fails: bool) -> None:
        self._cuda, self._graph, self._fails = cuda, graph, fails

    def __enter__(self) -> None:
        self._cuda.stream = "capture"
        self._cuda.capturing = self._graph
        if self._cuda.records:
            self._graph.recording = Recording(self._graph.calls)
            self._graph.recording.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._cuda.capturing = None
        if self._graph.recording is not None:
            self._graph.recording.__exit__(*exception)
        if self._fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore lines")
        self._cuda.stream = "main"
