"""How the threads of an executor wait for each other: decode steps alone, and beside a process that keeps a core busy.

    python -m benchmarks.cpu_threads.run
    python -m benchmarks.cpu_threads.run --preload libiomp5.so     # also Intel's OpenMP runtime in place of GNU's
    python -m benchmarks.cpu_threads.run --engines                 # torch and the CPU operations

Each setting of the OpenMP runtime has a process of its own, which runs decode steps of 16 sequences on a model runner,
without a scheduler. The processes take turns, and every number is a median over the rounds. On a machine that others
use too, a run waits for a quiet moment, but not forever, and with ``--first`` (for root) it has priority over the
others. The CPU time that others got during a run is written beside it; if enough runs were quiet, the medians are of
these alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from tqdm import tqdm

from benchmarks.record import record_file, write_record
from benchmarks.serving.workloads import build_model

SEQUENCES, PROMPT, STEPS = 16, 64, 128
RUN_SECONDS = 1.0
"""After so long a run ends early, because nothing is to be learnt from more of it."""
QUIET = 0.1
"""CPUs that others may use in a run that counts as quiet."""
ENOUGH = 3
"""Quiet runs from which on the others are left out."""

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "LD_PRELOAD")


class Setting(NamedTuple):
    """``threads``: None for all cores."""

    name: str
    variables: dict[str, str]
    threads: int | None = None
    kernels: Literal["torch", "cpu"] = "torch"


SETTINGS = [
    Setting("unset", {}),
    *(Setting(f"GOMP_SPINCOUNT={count}", {"GOMP_SPINCOUNT": str(count)}) for count in (0, 1000, 5000, 20_000)),
    Setting("OMP_WAIT_POLICY=passive", {"OMP_WAIT_POLICY": "passive"}),
    Setting("one thread", {}, 1),
]
_SLEEPING = {"GOMP_SPINCOUNT": "0"}
ENGINES = [
    Setting("torch", _SLEEPING),
    Setting("cpu", _SLEEPING, kernels="cpu"),
]


@dataclass
class Run:
    """``others``: CPUs that processes used which have no part in this."""

    model: str
    setting: str
    beside: str
    number: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    others: float


# ---- the process of one setting --------------------------------------------------------------------------


def serve_runs(model: str, threads: int | None, kernels: Literal["torch", "cpu"]) -> None:
    """Answer each line of standard input by a run: tokens, seconds and CPU seconds."""
    import numpy as np
    from pagewise_executor.model_runner import ModelRunner
    from pagewise_shared.config import ExecutorConfig
    from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
    from pagewise_shared.sampling import SamplingParams

    blocks = -(-(PROMPT + STEPS + 1) // 16)
    config = ExecutorConfig(
        model=model,
        device="cpu",
        dtype="float32",
        kernels=kernels,
        num_blocks=SEQUENCES * blocks,
        profile=False,
        threads=threads or "auto",
    )
    runner = ModelRunner(config)

    def run(steps: int) -> tuple[int, float, float]:
        runner.reset(Welcome(0, SEQUENCES, SEQUENCES * PROMPT))
        joined = [
            NewSequence(
                row,
                pack_int32s(range(10 + row, 10 + row + PROMPT)),
                PROMPT,
                0,
                np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32).tobytes(),
                SamplingParams(temperature=0.0),
            )
            for row in range(SEQUENCES)
        ]
        chunks = tuple((row, PROMPT) for row in range(SEQUENCES))
        runner.execute(StepPlan(0, 1, joined=tuple(joined), chunks=chunks)).result()
        began, cpu, done = time.perf_counter(), time.process_time(), 0
        while done < steps and time.perf_counter() - began < RUN_SECONDS:
            done += 1
            runner.execute(StepPlan(0, 1 + done)).result()
        return done * SEQUENCES, time.perf_counter() - began, time.process_time() - cpu

    run(4)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(run(STEPS)), flush=True)


class Contender:
    """The process of one setting."""

    def __init__(self, setting: Setting, model: str, first: bool) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        command = [sys.executable, "-m", "benchmarks.cpu_threads.run", "--child", model]
        self._process = subprocess.Popen(
            [*command, "--threads", str(setting.threads or 0), "--kernels", setting.kernels],
            env=environ | setting.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=go_first if first else None,
        )
        self._line("ready")
        self.pid = self._process.pid

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError("a contender ended early")

    def run(self) -> tuple[int, float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        tokens, seconds, cpu = json.loads(self._line("["))
        return tokens, seconds, cpu

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ---- all of them ---------------------------------------------------------------------------------------------


class Machine:
    """CPU time of everybody, and of the processes that belong to this benchmark."""

    def __init__(self) -> None:
        self.ours = [os.getpid()]

    def times(self) -> tuple[float, float]:
        """Seconds on the clock, and CPU seconds of all other processes."""
        everybody = psutil.cpu_times()
        used = sum(everybody) - everybody.idle - everybody.iowait - everybody.guest - everybody.guest_nice
        for pid in self.ours:
            own = psutil.Process(pid).cpu_times()
            used -= own.user + own.system
        return time.perf_counter(), used

    def wait_for_quiet(self, patience: float) -> None:
        """Until others are quiet, or for ``patience`` seconds."""
        until = time.perf_counter() + patience
        while time.perf_counter() < until:
            before = self.times()
            time.sleep(0.25)
            if _rate(before, self.times()) < QUIET:
                return


def _rate(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def go_first(pid: int = 0, thread: int = 0) -> None:
    """Let a thread of a process, by default of this one, go before others: by its session, which Linux looks at first,
    and by itself."""
    os.setpriority(os.PRIO_PROCESS, thread, -20)
    Path(f"/proc/{pid or 'self'}/autogroup").write_text("-20")


def busy_process(first: bool) -> "subprocess.Popen[bytes]":
    """A process that never rests, on the last CPU."""
    code = "import os\nos.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"
    return subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, preexec_fn=go_first if first else None
    )


def compare(model: str, path: str, settings: list[Setting], args: argparse.Namespace) -> list[Run]:
    machine, found = Machine(), []
    contenders: dict[str, Contender] = {}
    try:
        for setting in settings:
            contenders[setting.name] = Contender(setting, path, args.first)
        machine.ours += [contender.pid for contender in contenders.values()]
        turns = list(product(range(args.rounds), ("nothing", "a busy process")))
        for number, beside in tqdm(turns, desc=f"measuring {model}", unit=" turns", disable=None):
            other = busy_process(args.first) if beside != "nothing" else None
            machine.ours += [other.pid] if other else []
            for name, contender in contenders.items():
                machine.wait_for_quiet(args.patience)
                before = machine.times()
                tokens, seconds, cpu = contender.run()
                rates = round(tokens / seconds, 1), round(tokens / cpu, 1)
                others = round(max(0.0, _rate(before, machine.times())), 2)
                found.append(Run(model, name, beside, number, *rates, others))
            if other:
                machine.ours.remove(other.pid)
                other.kill()
                other.wait()
    finally:
        for contender in contenders.values():
            contender.close()
    return found


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    """Medians, of the quiet runs where there are enough."""
    cases: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        cases[run.model, run.setting, run.beside].append(run)
    rows: list[dict[str, Any]] = []
    for (model, setting, beside), members in cases.items():
        quiet = [run for run in members if run.others < QUIET]
        counted = quiet if len(quiet) >= ENOUGH else members
        rows.append(
            {
                "model": model,
                "setting": setting,
                "beside": beside,
                "tokens_per_s": round(statistics.median(run.tokens_per_s for run in counted)),
                "tokens_per_cpu_s": round(statistics.median(run.tokens_per_cpu_s for run in counted)),
                "slowest": round(min(run.tokens_per_s for run in counted)),
                "fastest": round(max(run.tokens_per_s for run in counted)),
                "runs": len(members),
                "quiet_runs": len(quiet),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["pagewise-demo", "49M"], help="49M is a random Llama")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a run waits for a quiet moment")
    parser.add_argument("--first", action="store_true", help="run at the highest priority, before other processes")
    parser.add_argument("--preload", metavar="FILE", help="an OpenMP runtime of Intel or LLVM to compare with")
    parser.add_argument(
        "--engines", action="store_true", help="compare torch and the CPU operations in place of the settings"
    )
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--smoke", action="store_true", help="one short round of the demo model, to see that it runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kernels", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve_runs(args.child, args.threads or None, args.kernels)
        return
    settings = list(ENGINES if args.engines else SETTINGS)
    if args.smoke:
        args.models, args.rounds, args.patience, settings = ["pagewise-demo"], 1, 0.0, settings[:2]
    if args.preload:
        for time_ms in (0, 200):
            variables = {"LD_PRELOAD": args.preload, "KMP_BLOCKTIME": str(time_ms)}
            settings.append(Setting(f"libiomp5, KMP_BLOCKTIME={time_ms}", variables))
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for model in args.models:
            if model == "49M":
                build_model(Path(folder))
            runs += compare(model, folder if model == "49M" else model, settings, args)
    rows = summary(runs)
    for row in rows:
        print(
            f"{row['model']:>14} {row['setting']:>28} beside {row['beside']:<15} {row['tokens_per_s']:>6} tok/s "
            f"({row['slowest']} to {row['fastest']}) {row['tokens_per_cpu_s']:>6} tok/CPU-s, "
            f"{row['quiet_runs']} of {row['runs']} runs quiet"
        )
    if args.json:
        write_record(args.json, {"rows": rows, "runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
