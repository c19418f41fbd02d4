"""An executor whose blocks outlive something: its prompts, its scheduler, and a process of its own that can be killed.

python -m tests.executor.inventories MODEL FOLDER [groups]: serves with few blocks, so that most of them go to the host
memory in FOLDER, prints that, and waits to be killed. With ``groups``, a model of two groups of layers computes a
prompt, whose blocks are copied there.
"""

import os
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

from pagewise_executor import group_choice
from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import DEVICE, HOST, BlockCopies, Welcome, pack_int32s

from tests.executor.driver import drive, request
from tests.executor.played_groups import Played
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


def run_and_kill(model_path: Path, folder: Path, *kind: str) -> None:
    """Run this module, and kill the executor once its blocks are on the host."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.executor.inventories", str(model_path), str(folder), *kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "served\n"
        child.send_signal(signal.SIGKILL)


def store_groups(path: Path, folder: Path) -> None:
    """Copy the full blocks of a prompt to the host, blocks of the second group in two lists."""
    played = Played(build_runner(path, host_folder=folder))
    played.rejoin(keep=False)
    full, windows = played.compute(PROMPTS[3])
    parts = (full, range(7), 0), (windows[:5], range(5), 1), (windows[5:], (9, 7), 1)
    played.copy(
        *(
            BlockCopies(DEVICE, HOST, pack_int32s(chain.from_iterable(zip(*places, strict=True))), group=group)
            for *places, group in parts
        )
    )


if __name__ == "__main__" and sys.argv[3:] == ["groups"]:
    group_choice._one_group = lambda *_: ""  # groups also where the scheduler would not use them
    store_groups(Path(sys.argv[1]), Path(sys.argv[2]))
    print("served", flush=True)
    sys.stdin.read()
elif __name__ == "__main__":
    runner = build_runner(Path(sys.argv[1]), host_folder=Path(sys.argv[2]), verify_copies=False)
    runner.reset(Welcome(1, 8, 64))
    serve(runner, scheduler_for(runner, 16))
    print("served", flush=True)
    sys.stdin.read()
