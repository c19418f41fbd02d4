"""An executor whose blocks outlive something: its prompts, its scheduler, and a process of its own that can be killed.

python -m tests.executor.inventories MODEL FOLDER: serves with few blocks, so that most of them go to the host memory
in FOLDER, says so, and waits to be killed.
"""

import sys
from pathlib import Path

from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import Welcome

from tests.executor.driver import drive, request
from tests.executor.runners import build_runner
from tests.model_builders import VOCAB_SIZE

PROMPTS = [[(7 * i + 11 * p) % (VOCAB_SIZE - 3) + 3 for i in range(60 + p)] for p in range(4)]


def scheduler_for(runner: ModelRunner, num_blocks: int) -> Scheduler:
    info = runner.info
    return Scheduler(
        num_blocks=num_blocks,
        block_size=info.block_size,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        tiers={tier.number: tier.num_blocks for tier in info.tiers},
        recovery="swap",
        model_fingerprint=info.model_fingerprint,
    )


def serve(runner: ModelRunner, scheduler: Scheduler, max_tokens: int = 20) -> list[Request]:
    requests = [request(prompt, max_tokens, name=f"r{i}") for i, prompt in enumerate(PROMPTS)]
    drive(runner, scheduler, requests)
    return requests


if __name__ == "__main__":
    runner = build_runner(Path(sys.argv[1]), host_folder=Path(sys.argv[2]), verify_copies=False)
    runner.reset(Welcome(1, 8, 64))
    serve(runner, scheduler_for(runner, 16))
    print("served", flush=True)
    sys.stdin.read()
