"""How kernels are measured: medians of CUDA-graph replays, beside ceilings that are measured in the same run."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pagewise_executor.models.few_rows import graph_milliseconds

from benchmarks.ceilings import copy_bandwidth
from benchmarks.kernels import peers

_CALLS = 20
_SECONDS_FOR_PEERS = 150
BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128


@dataclass
class Row:
    """``rate``: GB/s or TFLOP/s; ``share``: of the ceiling measured in the same run; ``bar``: the goal."""

    name: str
    who: str
    microseconds: float
    rate: float
    unit: str
    share: float
    bar: str = ""


class Bench:
    """Measures on ``device``; ``smoke``: once, tiny, without claims. ``added`` is called after each row."""

    def __init__(self, device: torch.device, smoke: bool, only: str) -> None:
        self.device, self.smoke, self.only = device, smoke, only
        self.rows: list[Row] = []
        self.added: Callable[[], None] = lambda: None
        self.began = time.perf_counter()
        self.copy_rate = self.matmul_rate = float("nan")

    def wants(self, name: str) -> bool:
        return self.only in name

    def time(self, call: Callable[[], object]) -> float:
        """Return the median microseconds of a call."""
        if self.smoke or self.device.type != "cuda":
            call()
            return float("nan")

        def calls() -> None:  # many, so that launching the graph weighs nothing
            for _ in range(_CALLS):
                call()

        return graph_milliseconds(calls) * 1e3 / _CALLS

    def bytes(self, name: str, who: str, call: Callable[[], object], moved: float, bar: str = "") -> None:
        taken = self.time(call)
        rate = moved / taken * 1e-3
        self._add(Row(name, who, taken, rate, "GB/s", rate / self.copy_rate, bar))

    def flops(self, name: str, who: str, call: Callable[[], object], done: float, bar: str = "") -> None:
        taken = self.time(call)
        rate = done / taken * 1e-6
        self._add(Row(name, who, taken, rate, "TFLOP/s", rate / self.matmul_rate, bar))

    def peer(self, who: str, make: peers.Make, measure: Callable[[Callable[[], object]], None]) -> None:
        """Measure a peer, unless it fails, or there is no time left for peers that have to be compiled."""
        if time.perf_counter() - self.began > _SECONDS_FOR_PEERS:
            print(f"{who}: no time left")
            return
        try:
            measure(make())
        except Exception as error:
            print(f"{who}: {type(error).__name__}: {str(error)[:100]}")

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(
            f"{row.name:<42}{row.who:<12}{row.microseconds:>10.1f} µs{row.rate:>9.1f} {row.unit:<8}"
            f"{row.share:>6.0%}  {row.bar}",
            flush=True,
        )
        self.added()

    def ceilings(self) -> None:
        """The rates of a copy and of a matrix product here, now."""
        self.copy_rate = float("nan") if self.smoke else copy_bandwidth() * 1e-9
        n = 64 if self.smoke else 8192
        a, b = (torch.randn(n, n, device=self.device).bfloat16() for _ in range(2))
        self.matmul_rate = 2 * n**3 / self.time(lambda: a @ b) * 1e-6
        print(f"copy {self.copy_rate:.0f} GB/s read and written, bfloat16 product {self.matmul_rate:.0f} TFLOP/s")
