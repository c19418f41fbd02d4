"""Kernels against what the device can do, and against peers that are installed.

    python -m benchmarks.kernels.run [--only TEXT] [--json FILE]

Bandwidth is compared with a copy and arithmetic with a bfloat16 matrix product, both measured in the same run. Medians
of CUDA-graph replays, so that launching does not count; small cases stay in the caches for all contenders alike. Peers:
FlashInfer, PyTorch's scaled dot product and flex attention where they are there. ``--smoke`` runs tiny shapes once, in
Triton's interpreter too, to see that everything works.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from pagewise_kernels.attention import Chunk, DecodePlan, PrefillPlan, decode_attention, prefill_attention
from pagewise_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pagewise_kernels.kv_write import write_kv
from pagewise_kernels.rms_norm import rms_norm
from pagewise_kernels.rope import rope
from pagewise_kernels.sampling import DrawParameters, sample
from pagewise_kernels.silu_mul import silu_mul

from benchmarks.kernels import peers
from benchmarks.record import write_record

_CALLS = 20
_SECONDS_FOR_PEERS = 150
BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128


@dataclass
class Row:
    """``rate``: GB/s or TFLOP/s; ``share``: of the ceiling measured in the same run; ``bar``: what it should reach."""

    name: str
    who: str
    microseconds: float
    rate: float
    unit: str
    share: float
    bar: str = ""


class Bench:
    """Measures on ``device``; ``smoke``: once, tiny, without claims."""

    def __init__(self, device: torch.device, smoke: bool, only: str) -> None:
        self.device, self.smoke, self.only = device, smoke, only
        self.rows: list[Row] = []
        self.began = time.perf_counter()
        self.copy_rate = self.matmul_rate = float("nan")

    def wants(self, name: str) -> bool:
        return self.only in name

    def time(self, call: Callable[[], object], repeats: int = 7) -> float:
        """Median microseconds of a call."""
        if self.smoke or self.device.type != "cuda":
            call()
            return float("nan")
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # many calls, so that launching the graph weighs nothing
            for _ in range(_CALLS):
                call()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
        return float(statistics.median(times))

    def bytes(self, name: str, who: str, call: Callable[[], object], moved: float, bar: str = "") -> None:
        taken = self.time(call)
        rate = moved / taken * 1e-3
        self._add(Row(name, who, taken, rate, "GB/s", rate / self.copy_rate, bar))

    def flops(self, name: str, who: str, call: Callable[[], object], done: float, bar: str = "") -> None:
        taken = self.time(call)
        rate = done / taken * 1e-6
        self._add(Row(name, who, taken, rate, "TFLOP/s", rate / self.matmul_rate, bar))

    def peer(self, who: str, make: peers.Make, measure: Callable[[Callable[[], object]], None]) -> None:
        """Measure a peer, unless it fails, or there is no time left for those that have to be compiled."""
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

    def ceilings(self) -> None:
        """What a copy and a matrix product reach here, now."""
        size = 2**16 if self.smoke else 2**31
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.copy_rate = 2 * size / self.time(lambda: target.copy_(source)) * 1e-3
        n = 64 if self.smoke else 8192
        a, b = (torch.randn(n, n, device=self.device).bfloat16() for _ in range(2))
        self.matmul_rate = 2 * n**3 / self.time(lambda: a @ b) * 1e-6
        print(f"copy {self.copy_rate:.0f} GB/s read and written, bfloat16 product {self.matmul_rate:.0f} TFLOP/s")


@dataclass
class Paged:
    """KV of ``batch`` sequences of ``context`` tokens, in blocks that lie in disorder."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor


def paged(bench: Bench, batch: int, context: int, *, prefill: bool = False) -> Paged:
    heads, kv_heads, dim = (4, 2, 16) if bench.smoke else (HEADS, KV_HEADS, HEAD_DIM)
    context = min(context, 40) if bench.smoke else context
    batch = min(batch, 2) if bench.smoke else batch
    blocks = -(-context // BLOCK_SIZE)
    shape = (batch * blocks, BLOCK_SIZE, kv_heads, dim)
    dtype = torch.bfloat16
    keys, values = (torch.randn(shape, device=bench.device, dtype=torch.float32).to(dtype) for _ in range(2))
    tables = torch.randperm(batch * blocks, device=bench.device).view(batch, blocks).int()
    lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    q = torch.randn(context if prefill else batch, heads, dim, device=bench.device).to(dtype)
    return Paged(q, keys, values, tables, lengths)


def decode(bench: Bench) -> None:
    for batch, context, bar in (
        (1, 1024, "<= 10 µs"),
        (1, 131_072, ""),
        (16, 8192, ">= 3,900 GB/s"),
        (64, 2048, ">= 3,900 GB/s"),
        (72, 2048, ">= 3,900 GB/s"),
        (256, 1024, ">= 3,900 GB/s"),
    ):
        name = f"decode {batch} x {context}"
        if not bench.wants(name):
            continue
        case = paged(bench, batch, context)
        count, heads, dim = case.q.shape
        plan = DecodePlan(
            max_queries=count, heads=heads, kv_heads=case.keys.shape[2], head_dim=dim, kv_dtype=case.keys.dtype,
            device=bench.device,
        )  # fmt: skip
        plan.plan(case.lengths)
        moved = 2 * case.keys.numel() * case.keys.element_size()

        def ours(case: Paged = case, plan: DecodePlan = plan) -> object:
            return decode_attention(case.q, case.keys, case.values, case.tables, plan)

        bench.bytes(name, "pagewise", ours, moved, bar)

        def planned(case: Paged = case, plan: DecodePlan = plan) -> object:
            plan.plan(case.lengths)
            return decode_attention(case.q, case.keys, case.values, case.tables, plan)

        bench.bytes(f"{name}, planned each time", "pagewise", planned, moved)
        for who, make in peers.decode(case.q, case.keys, case.values, case.tables, case.lengths):
            bench.peer(who, make, lambda call, who=who, name=name, moved=moved: bench.bytes(name, who, call, moved))  # type: ignore[misc]


def prefill(bench: Bench) -> None:
    for context in (4096, 8192, 32_768):
        name = f"prefill {context}"
        if not bench.wants(name):
            continue
        case = paged(bench, 1, context, prefill=True)
        size, heads, dim = case.q.shape
        plan = PrefillPlan(
            [Chunk(0, 0, size, 0)], heads=heads, kv_heads=case.keys.shape[2], head_dim=dim, kv_dtype=case.keys.dtype,
            device=bench.device,
        )  # fmt: skip
        done = 2 * heads * dim * size * size  # causal: half of 4 · n²

        def ours(case: Paged = case, plan: PrefillPlan = plan) -> object:
            return prefill_attention(case.q, case.keys, case.values, case.tables, plan)

        bench.flops(name, "pagewise", ours, done, ">= 0.75 x FA3 (541 to 639 TFLOP/s)")
        for who, make in peers.prefill(case.q, case.keys, case.values, case.tables, case.lengths):
            bench.peer(who, make, lambda call, who=who, name=name, done=done: bench.flops(name, who, call, done))  # type: ignore[misc]


def elementwise(bench: Bench) -> None:
    tokens, hidden, dtype = (3, 64, torch.bfloat16) if bench.smoke else (16_384, 4096, torch.bfloat16)
    item = dtype.itemsize

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device).to(dtype)

    x, weight, residual = random(tokens, hidden), random(hidden), random(tokens, hidden)
    out = torch.empty_like(x)
    bench.bytes("rms_norm", "pagewise", lambda: rms_norm(x, weight, 1e-6, out=out), 2 * x.numel() * item, ">= 85%")
    bench.bytes(
        "rms_norm with residual", "pagewise", lambda: rms_norm(x, weight, 1e-6, residual=residual, out=out),
        4 * x.numel() * item, ">= 85%",
    )  # fmt: skip
    torch_norm = torch.nn.functional.rms_norm
    bench.bytes("rms_norm", "torch", lambda: torch_norm(x, (hidden,), weight, 1e-6), 2 * x.numel() * item)
    gate_up = random(tokens, 4 * hidden)
    half = gate_up.numel() // 2
    gated = torch.empty(tokens, 2 * hidden, device=bench.device, dtype=dtype)
    bench.bytes("silu_mul", "pagewise", lambda: silu_mul(gate_up, gated), 3 * half * item)
    heads, dim = (2, 32) if bench.smoke else (KV_HEADS, HEAD_DIM)
    turned, angles = random(tokens, 5 * heads, dim), random(tokens, dim // 2)
    bench.bytes("rope", "pagewise", lambda: rope(turned, angles, angles), 2 * turned.numel() * item)
    pool = torch.zeros(2, 2 * (tokens // BLOCK_SIZE + 1), BLOCK_SIZE, heads, dim, device=bench.device, dtype=dtype)
    k, v = random(tokens, heads, dim), random(tokens, heads, dim)
    slots = torch.randperm(pool.shape[1] * BLOCK_SIZE, device=bench.device)[:tokens]
    bench.bytes("write_kv", "pagewise", lambda: write_kv(k, v, pool[0], pool[1], slots), 4 * k.numel() * item, ">= 85%")
    blocks = torch.randperm(pool.shape[1], device=bench.device)
    count = len(blocks) // 2
    pairs = torch.stack([blocks[:count], blocks[count : 2 * count]], 1).contiguous()
    size = pool[:, 0].numel() * item
    bench.bytes("copy_blocks", "pagewise", lambda: copy_blocks(pool, pairs), 2 * count * size, ">= 85%")
    staged = torch.empty(count, size, dtype=torch.uint8, device=bench.device)
    bench.bytes("gather_blocks", "pagewise", lambda: gather_blocks(pool, blocks[:count], staged), 2 * count * size)
    if bench.device.type == "cuda":
        pinned = torch.empty(count, size, dtype=torch.uint8, pin_memory=True)
        bench.bytes(
            "gather_blocks to the host", "pagewise", lambda: gather_blocks(pool, blocks[:count], pinned),
            count * size, ">= 45 GB/s",
        )  # fmt: skip
        bench.bytes(
            "scatter_blocks from the host", "pagewise", lambda: scatter_blocks(pool, blocks[:count], pinned),
            count * size, ">= 45 GB/s",
        )  # fmt: skip


def sampling(bench: Bench) -> None:
    rows, vocab = (2, 300) if bench.smoke else (256, 151_936)
    logits = torch.randn(rows, vocab, device=bench.device).bfloat16()
    index = torch.arange(rows, device=bench.device)
    for name, top_k, top_p in (("greedy or plain", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9)):
        parameters = DrawParameters(
            torch.ones(rows, device=bench.device),
            torch.full((rows,), top_k, dtype=torch.int32, device=bench.device),
            torch.full((rows,), top_p, device=bench.device),
            torch.zeros(rows, device=bench.device),
            index,
        )

        def draw(parameters: DrawParameters = parameters) -> object:
            return sample(logits, parameters, index.int(), index)

        bench.bytes(f"sample, {name}", "pagewise", draw, logits.numel() * 2)
    bench.bytes("softmax and sort", "torch", lambda: logits.float().softmax(-1).sort(-1), logits.numel() * 2)


def groups() -> Iterator[tuple[str, Callable[[Bench], None]]]:
    yield from (("decode", decode), ("prefill", prefill), ("elementwise", elementwise), ("sampling", sampling))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="groups or cases whose name contains this")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, once: does everything run?")
    parser.add_argument("--json", help="file to write the numbers to")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        parser.error("there is no GPU here: only --smoke makes sense")
    bench = Bench(device, args.smoke, args.only)
    bench.ceilings()
    for name, run in groups():
        if not args.only or args.only in name or name in args.only:
            run(bench)
            if args.json:  # after each group: what is measured is measured
                device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
                ceilings = {"copy_gb_per_s": bench.copy_rate, "matmul_tflop_per_s": bench.matmul_rate}
                numbers = {"ceilings": ceilings, "rows": [asdict(row) for row in bench.rows]}
                write_record(args.json, numbers, device=device_name, torch=torch.__version__)


if __name__ == "__main__":
    main()
