"""How long KV takes to come back from the host: loaded, computed again, both at once, or as the cost model chooses.

The real scheduler core in front of the real CPU executor, in one process, with links held to given bandwidths. A prompt
is computed, pushed out to the host, and asked for again: measured is the time from the request to its first token, all
methods side by side. Prints a table and, with ``--json`` and ``--plot``, writes numbers and a figure.
"""

import argparse
import queue
import random
import statistics
import tempfile
from array import array
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import PendingStep
from pagewise_executor.tiers.peers import MakePeers
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.core.tiers.recovery_plan import Recovery, RecoveryMode
from pagewise_scheduler.server.executor_checks import copy_costs
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import Copied, Found, LookUp, Message, RequestParams, Welcome
from pagewise_shared.sampling import SamplingParams
from tqdm import tqdm

from benchmarks.record import record_file, write_record

MODES: tuple[RecoveryMode, ...] = ("swap", "recompute", "both", "auto")
BUDGET = 2048


def build_model(path: Path, max_len: int) -> None:
    """A Llama of random weights whose KV is large beside its compute, as in models that are served."""
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=max_len,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


class Bench:
    """One executor behind one scheduler.

    ``bandwidth``: that the link to its host is held to, None if it is not. ``budget``: tokens of a step. ``options``:
    further ones of the executor, such as its storage.
    """

    def __init__(
        self,
        path: Path,
        bandwidth: float | None,
        tokens: int,
        exchange: MakePeers | None = None,
        budget: int = BUDGET,
        **options: Any,
    ) -> None:
        blocks = tokens // 16 + 32
        host = {} if bandwidth is None else {"host_memory": "2GiB", "host_bandwidth": str(int(bandwidth))}
        chosen: dict[str, Any] = {"device": "cpu"} | host | options
        config = ExecutorConfig(model=str(path), num_blocks=blocks, **chosen)
        self.runner = ModelRunner(config, exchange=exchange)
        info = self.runner.info
        assert info.costs is not None
        steps = {name: getattr(info.costs, name) * 1e-6 for name in info.costs.__struct_fields__}
        fetch_block = info.bytes_per_block / 1e9  # as the fleet guesses until it knows
        self.scheduler = Scheduler(
            num_blocks=blocks,
            block_size=info.block_size,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            tiers={tier.number: tier.num_blocks or tier.identity for tier in info.tiers},
            costs=Costs(**steps, tiers=copy_costs(info.tiers), fetch_block=fetch_block),
            recovery="both",  # keeps everything on the host; each run sets its own
        )
        self.recoveries: list[Recovery] = []
        self.scheduler.recoveries.emit = self.recoveries.append
        self.tiers = self.scheduler.kv.pool.lower
        for tier in self.tiers:
            tier.max_arriving = 1_000_000
        self.runner.reset(Welcome(1, 8, budget))
        self.copied: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self.runner.report_to(self._report)

    def _report(self, message: Message) -> None:
        if isinstance(message, Found):
            self.found.put(message)
        elif isinstance(message, Copied):
            self.copied.put(("copied", message))

    def first_token(self, prompt: "array[int]", name: str) -> float:
        """Seconds from the request to its token."""
        scheduler, results = self.scheduler, deque[PendingStep]()
        began = perf_counter()
        request = Request(name, prompt, 1, RequestParams(SamplingParams(temperature=0.0)), arrival_time=began)
        self._look_up(request)
        scheduler.add(request)
        while not request.sequences[0].finished:
            self._hear(block=False)
            while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(perf_counter())) is not None:
                results.append(self.runner.execute(plan))
            if results:
                scheduler.update(results.popleft().result())
            elif scheduler.recoveries.transfers.num_loading:
                self._hear(block=True)
        took = perf_counter() - began
        while any(tier.num_arriving for tier in self.tiers):
            self._hear(block=True)
        return took

    def _look_up(self, request: Request) -> None:
        root = self.scheduler.kv.pool.tree.root_hash(None)
        for storage in self.scheduler.kv.hashed.values():
            self.runner.handle(LookUp(1, 0, storage.number, root, request.prompt_token_ids.tobytes()))
            request.stored[storage.identity] = self.found.get(timeout=60).num_blocks

    def write_all(self) -> None:
        """Write all that waits to storage."""
        while any(tier.writes_back or tier.num_arriving for tier in self.scheduler.kv.hashed.values()):
            if (plan := self.scheduler.schedule(perf_counter())) is not None:
                self.scheduler.update(self.runner.execute(plan).result())
            else:
                self._hear(block=True)
            self._hear(block=False)

    def push_out(self) -> None:
        """Take the whole device from the cache for a moment."""
        pool = self.scheduler.kv.pool
        blocks, copies = pool.reserve(pool.num_blocks)
        self.scheduler.plan.copy(copies)
        pool.release(blocks)

    def _hear(self, *, block: bool) -> None:
        while block or not self.copied.empty():
            block = False
            message: Copied = self.copied.get(timeout=60)[1]
            self.scheduler.copied(message)


def measure(bench: Bench, tokens: int, repeats: int, about: str) -> dict[str, Any]:
    """Median milliseconds to the first token by mode, and the choices of auto. ``about``: for the progress bar."""
    prompt = prompt_of(tokens)
    bench.first_token(prompt, "cold")
    row, recoveries = timed(bench, prompt, repeats, about)
    median = row["median_ms"]
    return row | {
        "auto_predicted_ms": round(statistics.median(one.predicted for one in recoveries["auto"]) * 1e3, 2),
        "better_pure_over_both": round(min(median["swap"], median["recompute"]) / median["both"], 2),
        "share_loaded_by_both": round(statistics.median(one.loaded_tokens / tokens for one in recoveries["both"]), 2),
        "bytes_per_token": bench.runner.info.bytes_per_block // 16,
    }


def prompt_of(tokens: int, seed: int = 1) -> "array[int]":
    """A prompt of random tokens."""
    rng = random.Random(seed)
    return array("i", [rng.randrange(1024) for _ in range(tokens)])


def timed(
    bench: Bench, prompt: "array[int]", repeats: int, about: str
) -> tuple[dict[str, Any], dict[str, list[Recovery]]]:
    """Recover a prompt by each mode in turn. Return the medians with the choices of auto, and all recoveries by mode.

    A first round, which stores the blocks that are in no lower tier yet, is not measured.
    """
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    recoveries: dict[str, list[Recovery]] = {mode: [] for mode in MODES}
    for repeat in tqdm(range(repeats + 1), desc=about, unit=" rounds", disable=None):
        for mode in MODES:
            bench.push_out()
            bench.scheduler.recoveries.planner.policy.mode = mode
            bench.recoveries.clear()
            took = bench.first_token(prompt, f"{mode}{repeat}")
            if repeat:
                times[mode].append(took)
                recoveries[mode] += bench.recoveries[-1:]  # storage reports none of a prompt that is computed again
    median = {mode: round(statistics.median(values) * 1e3, 2) for mode, values in times.items()}
    chosen: list[str] = [one.method for one in recoveries["auto"]]
    row = {
        "median_ms": median,
        "auto_chose": max(set(chosen), key=chosen.count),
        "auto_over_best": round(median["auto"] / min(median[mode] for mode in MODES if mode != "auto"), 2),
    }
    return row, recoveries


HEADER = "".join(f"{mode + ' ms':>14}" for mode in MODES) + (
    f"{'auto chose':>12}{'auto/best':>11}{'best/both':>11}{'loaded':>8}"
)


def shown(row: dict[str, Any]) -> str:
    """A row below ``HEADER``."""
    values = "".join(f"{row['median_ms'][mode]:>14}" for mode in MODES)
    return f"{values}{row['auto_chose']:>12}{row['auto_over_best']:>11}{row['better_pure_over_both']:>11}" + (
        f"{row['share_loaded_by_both']:>8}"
    )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    names = {"swap": "load", "recompute": "recompute", "both": "both at once", "auto": "auto"}
    for mode in MODES:
        style: dict[str, Any] = {"linestyle": "--", "color": "black", "linewidth": 1} if mode == "auto" else {}
        axes.plot(
            [row["link_GB_per_s"] for row in rows],
            [row["median_ms"][mode] for row in rows],
            marker="o",
            markersize=4,
            label=names[mode],
            **style,
        )
    axes.set(xscale="log", yscale="log", xlabel="link, GB/s", ylabel="time to first token, ms")
    axes.legend(frameon=False)
    axes.grid(True, which="both", alpha=0.2)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt that comes back")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--links", type=float, nargs="+", default=[0.03, 0.1, 0.2, 0.3, 0.5, 1, 3, 10], help="GB/s")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--plot", help="file to draw the figure into (needs matplotlib)")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = []
    print(f"{'link GB/s':>10}{HEADER}")
    with tempfile.TemporaryDirectory() as directory:
        build_model(Path(directory), args.tokens + 64)
        for link in args.links:
            bench = Bench(Path(directory), link * 1e9, args.tokens)
            row = {"link_GB_per_s": link} | measure(bench, args.tokens, args.repeats, f"a link of {link:g} GB/s")
            rows.append(row)
            print(f"{link:>10}{shown(row)}", flush=True)
    if args.json:
        write_record(args.json, {"tokens": args.tokens, "rows": rows})
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
