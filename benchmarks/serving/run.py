"""Serving throughput and latency over HTTP, beside transformers on the same requests in the same run.

    python -m benchmarks.serving.run                        # 32 requests of unequal lengths, then of equal lengths
    python -m benchmarks.serving.run --rate 4 --contenders pagewise

Contenders: ``pagewise`` (``pagewise serve`` in its own processes, driven over HTTP), ``generate`` (transformers' static
batch, padded to the longest) and ``generate_batch`` (transformers' continuous batching). They take turns, and every
number is the median over the rounds. Useful tokens are those that were asked for; CPU seconds are user plus system
time of all processes that serve, without loading.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import psutil

from benchmarks.processes import Served
from benchmarks.record import record_file, write_record

VOCAB_SIZE = 4096  # that of the demo tokenizer, so that every token has text and streams at once


@dataclass
class Work:
    """One request: prompt token ids and how many tokens to generate."""

    prompt: list[int]
    output: int


def workload(name: str, count: int, seed: int = 0) -> list[Work]:
    """``unequal``: prompts of 16 to 512 tokens (log-uniform), outputs of 16 to 256; ``equal``: 128 and 128."""
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        prompt, output = (int(2 ** rng.uniform(4, 9)), rng.randint(16, 256)) if name == "unequal" else (128, 128)
        works.append(Work([rng.randrange(10, 4000) for _ in range(prompt)], output))
    return works


def build_model(path: Path) -> None:
    """A Llama of about 49 million parameters with random weights, and the demo model's tokenizer."""
    import shutil

    import torch
    from pagewise_shared.model_files import resolve_model
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=15,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=0)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("pagewise-demo") / name, path / name)


# ---- transformers, in a process of their own ------------------------------------------------------------


def run_transformers(kind: str, model_path: str, works: list[Work], device: str, dtype: str, rounds: int) -> None:
    """Print one JSON line per round: seconds and CPU seconds."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    torch.nn.Module.to(model, device).eval()  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        step: Callable[[list[Work]], None]
        if kind == "generate_batch":
            # ``max_new_tokens`` is each request's own; the manager's caches are made once, as a server would.
            options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 1}
            config = transformers.GenerationConfig(**options)  # type: ignore[no-untyped-call]
            manager = stack.enter_context(model.continuous_batching_context_manager(generation_config=config))
            step = functools.partial(_generate_batch, manager)
        else:
            step = functools.partial(_generate, model, device)
        step([Work(w.prompt[:8], 4) for w in works[:4]])
        print("ready", flush=True)
        for _ in range(rounds):
            sys.stdin.readline()
            began, cpu = time.perf_counter(), time.process_time()
            step(works)
            taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps(taken), flush=True)


def _generate(model, device: str, works: list[Work]) -> None:  # type: ignore[no-untyped-def]
    import torch

    longest = max(len(w.prompt) for w in works)
    ids = torch.tensor([[0] * (longest - len(w.prompt)) + w.prompt for w in works], device=device)
    mask = torch.tensor([[0] * (longest - len(w.prompt)) + [1] * len(w.prompt) for w in works], device=device)
    most = max(w.output for w in works)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, eos_token_id=None
        )
    assert out.shape[1] == longest + most


def _generate_batch(manager, works: list[Work]) -> None:  # type: ignore[no-untyped-def]
    wanted = {manager.add_request(w.prompt, max_new_tokens=w.output): w.output for w in works}
    done = 0
    while done < len(wanted):
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("continuous batching gave no result")
        if result.is_finished():
            assert len(result.generated_tokens) == wanted[result.request_id]
            done += 1


# ---- pagewise, over HTTP --------------------------------------------------------------------------------


@dataclass
class Timing:
    """Seconds from the start of one request."""

    first_token: float
    end: float
    gaps: list[float]
    tokens: int


async def one_request(session: aiohttp.ClientSession, url: str, work: Work, delay: float) -> Timing:
    await asyncio.sleep(delay)
    body = {
        "prompt": work.prompt,
        "max_tokens": work.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    arrivals.append(time.perf_counter())
                elif event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return Timing(arrivals[0] - began, time.perf_counter() - began, gaps, tokens)


async def drive(url: str, works: list[Work], rate: float | None, seed: int) -> list[Timing]:
    """All requests at once, or as a Poisson process of ``rate`` per second."""
    rng = random.Random(seed)
    delays, at = [], 0.0
    for _ in works:
        delays.append(at)
        at += rng.expovariate(rate) if rate else 0.0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        return await asyncio.gather(
            *(one_request(session, url, work, delay) for work, delay in zip(works, delays, strict=True))
        )


def cpu_seconds_of_tree(pid: int) -> float:
    """User and system seconds of a process and all below it."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


class Pagewise:
    """``pagewise serve`` on a free port."""

    def __init__(self, model_path: str, device: str, dtype: str) -> None:
        began = time.perf_counter()
        options = ("--device", device, "--dtype", dtype, "--log-level", "warning")
        self._server = Served(model_path, *options, ready_seconds=3600)
        self.process = self._server.process
        self.start_seconds = time.perf_counter() - began
        asyncio.run(drive(self._server.url, [Work([11] * 8, 4)] * 4, None, 0))

    def round(self, works: list[Work], rate: float | None, seed: int) -> dict[str, object]:
        cpu, began = cpu_seconds_of_tree(self.process.pid), time.perf_counter()
        timings = asyncio.run(drive(self._server.url, works, rate, seed))
        seconds = time.perf_counter() - began
        assert sum(t.tokens for t in timings) == sum(w.output for w in works)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds_of_tree(self.process.pid) - cpu,
            "ttft": [t.first_token for t in timings],
            "itl": [gap for t in timings for gap in t.gaps],
        }

    def close(self) -> None:
        self._server.close()


class Transformers:
    """A subprocess of this script that generates with transformers, by one of its methods."""

    def __init__(self, kind: str, works: list[Work], args: argparse.Namespace, model_path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.run", "--child", kind, "--model", model_path,
             "--device", args.device, "--dtype", args.dtype, "--rounds", str(args.rounds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([asdict(w) for w in works]) + "\n")
        self.process.stdin.flush()
        self._expect("ready")

    def _expect(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError("transformers ended early")

    def round(self, works: list[Work], rate: float | None, seed: int) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return dict(json.loads(self._expect("{")))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compare(name: str, args: argparse.Namespace, model_path: str) -> dict[str, object]:
    works = workload(name, args.requests)
    useful = sum(w.output for w in works)
    contenders: dict[str, Pagewise | Transformers] = {}
    rounds: dict[str, list[dict[str, object]]] = {kind: [] for kind in args.contenders}
    try:
        for kind in args.contenders:
            contenders[kind] = (
                Pagewise(model_path, args.device, args.dtype)
                if kind == "pagewise"
                else Transformers(kind, works, args, model_path)
            )
        for number in range(args.rounds):
            for kind, contender in contenders.items():
                rounds[kind].append(contender.round(works, args.rate, number))
    finally:
        for contender in contenders.values():
            contender.close()
    rows = {}
    for kind, results in rounds.items():
        row: dict[str, object] = {
            "useful_tokens_per_second": round(statistics.median(useful / r["seconds"] for r in results), 1),  # type: ignore[operator]
            "useful_tokens_per_cpu_second": round(statistics.median(useful / r["cpu_seconds"] for r in results), 1),  # type: ignore[operator]
        }
        if kind == "pagewise":
            for metric in ("ttft", "itl"):
                values = [v for r in results for v in r[metric]]  # type: ignore[attr-defined]
                row |= {f"{metric}_p{p}_ms": round(percentile(values, p / 100) * 1e3, 1) for p in (50, 90, 99)}
            pagewise = contenders[kind]
            assert isinstance(pagewise, Pagewise)
            row["start_seconds"] = round(pagewise.start_seconds, 1)
        rows[kind] = row
    return {"workload": name, "requests": args.requests, "useful_tokens": useful, "rows": rows}


def report(results: list[dict[str, object]]) -> None:
    for result in results:
        rows: dict[str, dict[str, float]] = result["rows"]  # type: ignore[assignment]
        print(f"\n{result['workload']} lengths, {result['requests']} requests, {result['useful_tokens']} useful tokens")
        print(f"{'':>16} {'tok/s':>9} {'tok/CPU-s':>10} {'pagewise is':>12}")
        ours = rows.get("pagewise", {}).get("useful_tokens_per_second")
        for kind, row in rows.items():
            ratio = f"{ours / row['useful_tokens_per_second']:.2f}x" if ours else ""
            print(
                f"{kind:>16} {row['useful_tokens_per_second']:>9} {row['useful_tokens_per_cpu_second']:>10} {ratio:>12}"
            )
        latency = {k: v for k, v in rows.get("pagewise", {}).items() if k.endswith("_ms")}
        if latency:
            print("   pagewise latency, ms: " + ", ".join(f"{k[:-3]} {v}" for k, v in latency.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model directory (default: a random Llama of 49M parameters)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, help="requests per second, Poisson (default: all at once)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=["unequal", "equal"], choices=["unequal", "equal"])
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["pagewise", "generate", "generate_batch"],
        choices=["pagewise", "generate", "generate_batch"],
    )
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        works = [Work(**w) for w in json.loads(sys.stdin.readline())]
        run_transformers(args.child, args.model, works, args.device, args.dtype, args.rounds)
        return
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            build_model(Path(directory))
        results = [compare(name, args, args.model or directory) for name in args.workloads]
    report(results)
    if args.json:
        write_record(args.json, {"results": results}, device=args.device, dtype=args.dtype)


if __name__ == "__main__":
    main()
