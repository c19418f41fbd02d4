"""How long KV takes to come back from storage: loaded, computed again, both at once, or as the cost model chooses.

The real scheduler core in front of the real CPU executor, in one process. A prompt is computed and written to a folder,
and to a Redis server if there is one, then pushed out of the device and asked for again: measured is the time from the
request to its first token, the look-up included, all methods side by side. Prints a table and, with ``--json``, writes
numbers.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import transformers
from pagewise_shared.protocol import tier_name

from benchmarks.processes import free_port
from benchmarks.record import record_file, write_record
from benchmarks.recovery.run import MODES, Bench, build_model, prompt_of, timed


def measure(path: Path, tokens: int, repeats: int, **storage: Any) -> dict[str, Any]:
    """Median milliseconds to the first token by mode, and the choice of auto."""
    bench = Bench(path, None, tokens, **storage)
    prompt = prompt_of(tokens, tokens)
    bench.first_token(prompt, "cold")
    bench.write_all()
    row, _ = timed(bench, prompt, repeats, f"{tokens} tokens")
    counters = bench.scheduler.kv.pool.counters
    assert counters.recall_failed == 0
    (offered,) = bench.runner.info.tiers
    bench.runner.close()
    return row | {
        "storage": tier_name(offered.number),
        "tokens": tokens,
        "bytes_per_token": bench.runner.info.bytes_per_block // 16,
        "measured_load_block_us": round(offered.load_block, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192], help="lengths of prompts")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the disk cache is made (default: a temporary folder)")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    rows = []
    print(
        f"{'':>8}{'tokens':>8}" + "".join(f"{mode + ' ms':>14}" for mode in MODES) + f"{'auto chose':>12}{'/best':>7}"
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as directory:
        folder, port = Path(directory), free_port()
        build_model(folder / "model", max(args.tokens) + 64)
        ways = [{"disk_cache": str(folder / "cache")}]
        process = None
        if server is not None:
            command = [server, "--port", str(port), "--save", "", "--dir", directory]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            ways.append({"store": f"redis://127.0.0.1:{port}/0"})
        try:
            for way in ways:
                for tokens in args.tokens:
                    row = measure(folder / "model", tokens, args.repeats, **way)
                    rows.append(row)
                    values = "".join(f"{row['median_ms'][mode]:>14}" for mode in MODES)
                    name = f"{row['storage']:>8}{tokens:>8}"
                    print(f"{name}{values}{row['auto_chose']:>12}{row['auto_over_best']:>7}", flush=True)
        finally:
            if process is not None:
                process.kill()
                process.wait()
    if args.json:
        write_record(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
