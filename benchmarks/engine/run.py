"""The executor with the scheduler's core in front of it, in one process: how near to the limits, and to others.

    python -m benchmarks.engine.run [--models llama-3-8b qwen3-0.6b] [--json FILE]

Models have the shapes of real ones and random weights. Decode at batch 1, 64 and 256 with 1k of context, prefill of 4k
and 32k, and a mix with ShareGPT lengths; transformers' ``generate`` and ``generate_batch`` with the same prompts in the
same run, and vLLM where it is installed. The limit of a decode step is the time to read weights and KV once at the
bandwidth of a copy measured in the same run. ``--smoke`` runs a tiny model, in the interpreter too, to see that all
works.

Ours run first, and each result is written at once. The others have a process and a deadline each, so that one that is
stuck, or a run that is cut off, costs only the missing results.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import PendingStep
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.traces import read_trace
from pagewise_shared.config import Device, ExecutorConfig
from pagewise_shared.protocol import RequestParams, Welcome
from pagewise_shared.sampling import SamplingParams

from benchmarks.ceilings import copy_bandwidth
from benchmarks.record import record_file, write_record

TRACE = Path(__file__).parents[1] / "traces" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"
_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("LlamaConfig", _LLAMA),
    "qwen3-0.6b": ("Qwen3Config", _QWEN),
    # Six of 48 layers: all of them take 60 GB, and longer to build than to measure.
    "qwen3-30b-a3b-6-layers": ("Qwen3MoeConfig", _MOE),
    "tiny": ("LlamaConfig", _TINY),
}


WAYS: dict[str, dict[str, Any]] = {
    "pagewise, apart": {"dependent_launch": False},
    "pagewise, fp8": {"quantization": "fp8"},
}
"""Ours by other options, by the name in the rows."""


@dataclass
class Work:
    """Requests that all come at once: (prompt tokens, output tokens) of each."""

    name: str
    lengths: list[tuple[int, int]]

    def rate(self, seconds: float) -> float:
        """Output tokens per second; of prefills prompt tokens."""
        prefill = self.name.startswith("prefill")
        return sum(prompt if prefill else output for prompt, output in self.lengths) / seconds


@dataclass
class Row:
    """``rate``: output tokens per second over the whole of it, of prefills prompt tokens; the same for everybody.

    ``decoding``: tokens per second while all sequences decode, and ``share`` of the limit that this is; ours alone, as
    is ``start_seconds``: until the executor was ready, with the kernels that it had to compile.
    """

    model: str
    work: str
    who: str
    rate: float
    decoding: float | None = None
    share: float | None = None
    first_token_ms: float | None = None
    start_seconds: float | None = None


def works(smoke: bool) -> list[Work]:
    if smoke:
        return [Work("decode 2", [(9, 4)] * 2), Work("prefill 20", [(20, 1)]), Work("mix", [(5, 3), (9, 6), (2, 1)])]
    rng = random.Random(1)
    trace = rng.sample(read_trace(TRACE), 256)
    mix = [(min(r.num_prompt_tokens, 2048), min(r.num_output_tokens, 512)) for r in trace]
    decodes = [Work(f"decode {batch}", [(1024, 128)] * batch) for batch in (1, 64, 256)]
    return [*decodes, Work("prefill 4096", [(4096, 1)]), Work("prefill 32768", [(32_768, 1)]), Work("mix", mix)]


def build(name: str, path: Path, device: str) -> None:
    """Random weights in the shape of a real model, saved."""
    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    dtype = torch.float32 if name == "tiny" else torch.bfloat16
    with torch.device(device):
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=dtype)
    model.save_pretrained(path)
    del model
    tidy()


def prompts(work: Work, vocab_size: int, call: int) -> list[list[int]]:
    """Other prompts for each call, so that no engine finds them in a cache."""
    rng = random.Random(f"{work.name} {call}")
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length, _ in work.lengths]


def drive(runner: ModelRunner, work: Work, budget: int) -> tuple[float, float, list[float]]:
    """Seconds in all, seconds to the first token, and seconds of each step in which everybody decoded."""
    scheduler = Scheduler(
        num_blocks=runner.info.num_blocks, block_size=runner.info.block_size, max_num_seqs=256,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    runner.reset(Welcome(1, 256, budget))
    params = RequestParams(SamplingParams(temperature=0.0))
    asked = zip(prompts(work, runner.info.vocab_size, 0), work.lengths, strict=True)
    for number, (prompt, (_, output)) in enumerate(asked):
        scheduler.add(Request(str(number), array("i", prompt), output, params))
    in_flight: deque[tuple[PendingStep, bool]] = deque()
    decodes: list[float] = []
    began = last = time.perf_counter()
    first = 0.0
    while True:
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append((runner.execute(plan), not plan.chunks and scheduler.num_running == len(work.lengths)))
        if not in_flight:
            return time.perf_counter() - began, first, decodes
        pending, all_decode = in_flight.popleft()
        scheduler.update(pending.result())
        now = time.perf_counter()
        first = first or now - began
        if all_decode:
            decodes.append(now - last)
        last = now


def ours(
    model: str, path: Path, device: Device, todo: list[Work], copy_rate: float, smoke: bool, who: str = "pagewise"
) -> Iterator[Row]:
    """``who``: "pagewise", or a key of ``WAYS``, whose options are set."""
    budget = 64 if smoke else 8192
    config = ExecutorConfig(
        model=str(path), device=device, kernels="triton", profile=False, max_num_seqs=256,
        max_num_batched_tokens=budget, num_blocks=64 if smoke else None, **WAYS.get(who, {}),
    )  # fmt: skip
    began = time.perf_counter()
    runner = ModelRunner(config)
    start_seconds = time.perf_counter() - began
    loaded = runner._forward_pass.model
    for work in todo:
        drive(runner, Work(work.name, [(length, min(output, 8)) for length, output in work.lengths]), budget)
        seconds, first, decodes = drive(runner, work, budget)
        row = Row(
            model, work.name, who, work.rate(seconds), first_token_ms=1e3 * first, start_seconds=start_seconds
        )  # fmt: skip
        if work.name.startswith("decode") and len(decodes) > 3:
            step = statistics.median(decodes)
            row.decoding = len(work.lengths) / step
            context = sum(length + output / 2 for length, output in work.lengths)
            weights = weights_read(loaded, MODELS[model][1], len(work.lengths))
            read = weights + context * runner.info.bytes_per_block / runner.info.block_size
            row.share = read / copy_rate / step if copy_rate else None
        yield row


def weights_read(loaded: torch.nn.Module, settings: dict[str, Any], batch: int) -> float:
    """Bytes of weights that a decode step of ``batch`` sequences reads, with experts that are chosen at random."""
    experts = settings.get("num_experts", 1)
    chosen = 1 - (1 - settings.get("num_experts_per_tok", 1) / experts) ** batch
    read = 0.0
    for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
        # Of the embedding it reads one row for each sequence, unless that is the head as well.
        if "embed_tokens" not in name or settings["tie_word_embeddings"]:
            read += tensor.numel() * tensor.element_size() * (chosen if ".experts." in name else 1.0)
    return read


def theirs(name: str, path: Path, device: str, todo: list[Work]) -> Iterator[Row]:
    """transformers: ``generate`` on a static batch of equal prompts, ``generate_batch`` (continuous) on anything."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model.to(device).eval()
    with contextlib.ExitStack() as stack:
        vocab_size = model.config.vocab_size
        for work in todo:
            if len(set(work.lengths)) == 1 and len(work.lengths) <= 64:
                seconds = timed(work, vocab_size, functools.partial(static_batch, model, device, work))
                yield Row(name, work.name, "generate", work.rate(seconds))
        make: Any = transformers.GenerationConfig
        config = make(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        manager = stack.enter_context(model.continuous_batching_context_manager(generation_config=config))
        for work in todo:
            seconds = timed(work, vocab_size, functools.partial(continuous, manager, work))
            yield Row(name, work.name, "generate_batch", work.rate(seconds))


def static_batch(model: Any, device: str, work: Work, inputs: list[list[int]]) -> None:
    ids = torch.tensor(inputs, device=device)
    output = work.lengths[0][1]
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output, do_sample=False
    )


def continuous(manager: Any, work: Work, inputs: list[list[int]]) -> None:
    asked = zip(inputs, work.lengths, strict=True)
    waiting = {manager.add_request(prompt, max_new_tokens=output) for prompt, (_, output) in asked}
    while waiting:
        result = manager.get_result(timeout=300)
        if result is None:
            raise RuntimeError("continuous batching gave no result")
        if result.is_finished():
            waiting.discard(result.request_id)


def vllm(model: str, path: Path, _device: str, todo: list[Work]) -> Iterator[Row]:
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    engine = LLM(
        str(path), skip_tokenizer_init=True, gpu_memory_utilization=0.85, max_num_seqs=256, enable_prefix_caching=False
    )
    for work in todo:
        params = [
            VllmSampling(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            for _, output in work.lengths
        ]

        def generate(inputs: list[list[int]], params: list[Any] = params) -> None:
            engine.generate([{"prompt_token_ids": prompt} for prompt in inputs], params, use_tqdm=False)

        seconds = timed(work, MODELS[model][1]["vocab_size"], generate)
        yield Row(model, work.name, "vllm", work.rate(seconds))


def timed(work: Work, vocab_size: int, serve: Callable[[list[list[int]]], None]) -> float:
    """Seconds of a second call: the first one warms up, with other prompts."""
    serve(prompts(work, vocab_size, 1))
    inputs = prompts(work, vocab_size, 2)
    began = time.perf_counter()
    serve(inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def apart(contender: Callable[[], Iterator[Row]], seconds: float) -> Iterator[Row]:
    """Rows of a contender in a process of its own, which is ended after ``seconds``, with all that it has started."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_rows, args=(contender, sender))
    process.start()
    sender.close()
    deadline = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            yield receiver.recv()
        print(f"cut off after {seconds:g} s", flush=True)
    except EOFError:  # it is done
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has made no group yet, or the group has ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def send_rows(contender: Callable[[], Iterator[Row]], sender: Connection) -> None:
    os.setpgrp()
    try:
        for row in contender():
            sender.send(row)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:200]}", flush=True)
    sender.close()


def tidy() -> None:
    """Free the last model's memory on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def show(row: Row) -> Row:
    share = "" if row.decoding is None else f"decoding {row.decoding:.0f}"
    share += "" if row.share is None else f", {row.share:.0%} of the limit"
    print(f"{row.model:<12}{row.work:<16}{row.who:<16}{row.rate:>10.0f} tokens/s {share}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama-3-8b", "qwen3-0.6b"])
    parser.add_argument("--works", nargs="+", help="workloads by name, as they are printed (default: all)")
    parser.add_argument("--alone", action="store_true", help="without the others")
    parser.add_argument("--also-apart", action="store_true", help="ours also with --no-dependent-launch")
    parser.add_argument("--also-fp8", action="store_true", help="ours also with --quantization fp8")
    parser.add_argument("--deadline", type=float, default=90, help="seconds for each of the others and model (90)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once: does everything run?")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.smoke:
        parser.error("there is no GPU here: only --smoke makes sense")
    copy_rate = copy_bandwidth()
    todo = [work for work in works(args.smoke) if not args.works or work.name in args.works]
    others = [] if args.alone else [theirs, vllm] if importlib.util.find_spec("vllm") else [theirs]
    found: list[Row] = []

    def keep(rows: Iterable[Row]) -> None:
        for row in rows:
            found.append(show(row))
            save(args.json, found, copy_rate)

    with contextlib.ExitStack() as stack:
        paths: dict[str, Path] = {}
        for model in ["tiny"] if args.smoke else args.models:
            paths[model] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            build(model, paths[model], device)
            ways = [*["pagewise, apart"] * args.also_apart, *["pagewise, fp8"] * args.also_fp8]
            for who in ("pagewise", *ways):
                keep(ours(model, paths[model], device, todo, copy_rate, args.smoke, who))
                tidy()
        for model, path in paths.items():
            for contender in others:
                keep(apart(functools.partial(contender, model, path, device, todo), args.deadline))


def save(path: str | None, rows: list[Row], copy_rate: float) -> None:
    """Write the results so far."""
    if path is None:
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    numbers = {"copy_gb_per_s": copy_rate * 1e-9, "rows": [asdict(row) for row in rows]}
    write_record(path, numbers, device=name, torch=torch.__version__, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
