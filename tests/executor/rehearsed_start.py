"""Starts an executor on a fake of CUDA's driver after its kernels were compiled ahead. A process of its own runs it:

    python -m tests.executor.rehearsed_start FOLDER OPTIONS [--not-ahead]

They were compiled into a folder that is linked into Triton's cache, as in an image; with ``--not-ahead`` they were not.
It prints which kernels the start found, which ones it had to compile, how many launchers it built, and how many
launches were Triton's. FOLDER: of the model. OPTIONS: of the executor, in JSON. Kernels compute nothing here, so
results are not compared.
"""

import json
import os
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from pagewise_executor.cuda_graphs.graphed_steps import GraphedSteps
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.kernel_checks import run
from pagewise_executor.kernel_checks.kernels import KERNELS, kernels_of
from pagewise_executor.kernel_checks.use import use_of
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models import compilation
from pagewise_executor.models.compilation import Ahead, Compilation, link_shipped
from pagewise_executor.models.few_rows import choose_few_rows
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.operations import TritonOperations
from pagewise_executor.warm_up import warm_up, warm_up_copies
from pagewise_kernels.launch import num_unfrozen_launches
from pagewise_shared.config import ExecutorConfig

from benchmarks.launch.fake_driver import fake_driver, missing


def check_kernels(config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype, pages: None) -> None:
    """Take the place of the executor's, and compare no results."""
    use = use_of(config, loaded, kv_dtype)
    with torch.inference_mode():
        for name in kernels_of(use):
            deque(KERNELS[name][1](use), 0)


def start(config: ExecutorConfig) -> None:
    """Launch all kernels of a start, as on a GPU."""
    run.check_kernels = check_kernels
    runner = ModelRunner(config)
    graphs, model = runner._graphs, runner._forward_pass.model
    assert graphs is not None
    if not config.deterministic:
        choose_few_rows(model, TritonOperations(), lambda call: call() or 0.0)  # type: ignore[func-returns-value]
    with torch.inference_mode():
        for steps in graphs:
            compute_all(steps)
        warm_up_copies(runner._pool)
        runner._mover.warm_up()
        if runner._adapters is not None:
            runner._adapters.slots.warm_up()
    assert config.max_num_batched_tokens is not None
    warm_up(runner, runner._pool, torch.bfloat16, config.max_num_batched_tokens, graphs.mixed.sizes[-1] + 1)


def compute_all(steps: GraphedSteps) -> None:
    """Compute a step of each size, as a capture does."""
    for size in reversed(steps.sizes):
        for uses in steps.variants():
            steps.clear(size)
            steps.use_adapters(size, uses=uses)
            steps.compute(size)


def main() -> None:
    if reason := missing():
        print("skipped:", reason)
        return
    found: dict[bool, list[str]] = {True: [], False: []}

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        found[cache_hit].append(src.name)

    options = {"max_num_seqs": 20, "max_num_batched_tokens": 128, "dtype": "bfloat16", **json.loads(sys.argv[2])}
    with tempfile.TemporaryDirectory() as folder, fake_driver(Path(folder)):
        shipped, cache, done = (Path(folder) / name for name in ("shipped", "cache", "done"))
        os.environ["TRITON_CACHE_DIR"] = str(shipped)
        compilation._MOST_SECONDS = 600  # of a machine with other work
        if "--not-ahead" not in sys.argv:
            Compilation(Ahead(config=ExecutorConfig(model=sys.argv[1], **options), capability=90), done).wait()
            assert done.exists()
        os.environ["TRITON_CACHE_DIR"], compilation.SHIPPED = str(cache), shipped
        link_shipped()
        launchers = len(list(cache.glob("*/*launcher*")))
        triton.knobs.compilation.listener = listen
        start(
            ExecutorConfig(
                model=sys.argv[1], device="cpu", kernels="triton", num_blocks=200, profile=False, threads=1, **options
            )
        )
        launchers -= len(list(cache.glob("*/*launcher*")))
    unfrozen = num_unfrozen_launches()
    print(json.dumps({"found": found[True], "compiled": found[False], "launchers": -launchers, "unfrozen": unfrozen}))


if __name__ == "__main__":
    main()
