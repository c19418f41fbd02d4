"""Pagewise beside another OpenAI-compatible server, ``transformers serve``, as ``pagewise bench`` measures both.

    python -m benchmarks.servers.run --json benchmarks/results/servers-cpu.json --plot docs/figures/servers-cpu.svg

Both serve the same random Llama of 49M parameters in float32 on this machine's CPU, and are idle while another one is
measured. ``transformers`` is the server as it starts, ``transformers batching`` the one with
``--continuous-batching``. Workloads are closed loops that last some seconds in each round. What ``transformers serve``
needs beside transformers is installed into a folder of its own, and kept. ``--only-table`` prints the table of a record
that is there; ``--put-into`` writes it between two comments of a document.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagewise_shared.model_files import resolve_model

from benchmarks import environments
from benchmarks.processes import Process, Served, answers, free_port, wait_until
from benchmarks.record import record_file, shown, write_record
from benchmarks.serving.workloads import build_model

_PACKAGES = Path(__file__).with_name("transformers-serve.txt")
_KV_BLOCKS = 512
"""Of 32 tokens: 1 GiB in float32. Unless it is told, the server takes most of the machine's memory."""

WORKLOADS: dict[str, dict[str, object]] = {
    "prefix_repetition": {
        "prefix-repetition-num-prefixes": 4,
        "prefix-repetition-prefix-len": 448,
        "prefix-repetition-suffix-len": 64,
        "prefix-repetition-output-len": 32,
    },
    "multi-turn": {
        "backend": "openai-chat",
        "multi-turn-num-turns": 4,
        "multi-turn-prefix-len": 128,
        "multi-turn-input-len": 64,
        "multi-turn-output-len": 32,
    },
}
"""Options of ``pagewise bench`` by the names of the workloads."""


@contextlib.contextmanager
def transformers_serve(model: Path, folder: Path, name: str, *options: str) -> Iterator[str]:
    """The URL of a ``transformers serve`` that has loaded the model."""
    port = free_port()
    environment = os.environ | {
        "PYTHONPATH": str(environments.packages(_PACKAGES)),
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), *options]
    process = Process(name, command, folder, environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), 240.0, "a transformers serve", process)
        yield url
    finally:
        process.close()


def measured(
    urls: dict[str, str], model: Path, workload: str, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """What ``pagewise bench`` says of a workload on all servers."""
    options: dict[str, object] = {
        "model": model,
        "dataset-name": workload,
        "max-concurrency": args.concurrency,
        "duration": args.seconds,
        "rounds": args.rounds,
        "num-warmups": 1,
        "result-filename": "result.json",
        "result-dir": folder,
        **WORKLOADS[workload],
    }
    if args.plot is not None:
        options["plot"] = args.plot.with_stem(f"{args.plot.stem}-{workload.replace('_', '-')}")
    command = [f"--base-url={name}={url}" for name, url in urls.items()]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, "-m", "pagewise.main", "bench", *command], check=True)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    for server in result["servers"]:
        server["model"] = "llama-49m"
    result["settings"]["model"] = "llama-49m"
    result["command"] = "pagewise bench " + " ".join(
        shown(each) for each in command if not each.startswith(("--result-", "--plot"))
    )
    return result


def table(record: dict[str, Any]) -> str:
    """A record as Markdown: medians over the rounds, and the first server over each."""
    rows = [
        ("requests/s", "request_throughput"),
        ("output tokens/s", "output_throughput"),
        ("TTFT median, ms", "ttft_ms.median"),
        ("TPOT median, ms", "tpot_ms.median"),
        ("prompt tokens from cache", "cached_share"),
    ]
    lines = []
    for result in record["results"]:
        servers = result["servers"]
        lines += [f"| {result['settings']['dataset_name']} | " + " | ".join(one["name"] for one in servers) + " |"]
        lines += ["|---" * (len(servers) + 1) + "|"]
        for title, key in rows:
            lines += [f"| {title} | " + " | ".join(_cell(one, key) for one in servers) + " |"]
        lines += [""]
    told = record["results"][0]["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [
        f"{told['rounds']} rounds of {told['duration']:g} s, {told['max_concurrency']} requests or sessions at once,",
        f"{record['machine']['cores']} cores (load average when it began: {record['load_average']:g}), {versions},",
        f"commit {record['commit']}. In parentheses: Pagewise over that server, the median of the ratios of the",
        "rounds; ~: rounds do not agree which is larger, or are too few to tell.",
    ]
    return "\n".join(lines)


def put_into(document: Path, text: str) -> None:
    """Write ``text`` between the two comments of a document."""
    before, begin, rest = document.read_text().partition("<!-- benchmarks.servers -->\n")
    _, end, after = rest.partition("<!-- /benchmarks.servers -->\n")
    assert begin, document
    assert end, document
    document.write_text(f"{before}{begin}{text}\n{end}{after}")


def _cell(server: dict[str, Any], key: str) -> str:
    value = server["medians"].get(key)
    if value is None:
        return "not told"
    shown_as = ".0%" if key == "cached_share" else ",.1f" if value >= 10 else ".2f"
    text = f"{value:{shown_as}}"
    ratio = server.get("first_over_this", {}).get(key)
    return text if ratio is None else f"{text} ({'' if ratio['differs'] else '~'}{ratio['median']:.2f}\u00d7)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=2.5, help="in which requests start, of each load")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument(
        "--only-table", type=Path, metavar="RECORD", help="print the table of a record, measure nothing"
    )
    parser.add_argument("--put-into", type=Path, metavar="DOCUMENT", help="of --only-table")
    parser.add_argument("--plot", type=Path, help="figures, with the workload's name behind theirs")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.only_table is not None:
        text = table(json.loads(args.only_table.read_text()))
        print(text) if args.put_into is None else put_into(args.put_into, text)
        return
    print(measure(args))


def measure(args: argparse.Namespace) -> str:
    """Measure all workloads, write the record after each of them, and return its table."""
    load_average = round(os.getloadavg()[0], 2)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        model = folder / "llama-49m"
        model.mkdir()
        build_model(model)
        shutil.copy(resolve_model("pagewise-demo") / "chat_template.jinja", model)
        # Nothing ends a text: one of the servers takes no ignore_eos, and outputs have to be as long on all.
        (model / "generation_config.json").write_text('{"bos_token_id": 0, "pad_token_id": 0}')
        pagewise = Served(str(model), "--device", "cpu", "--dtype", "float32", "--log-level", "warning")
        stack.callback(pagewise.close)
        batching = ("--continuous-batching", f"--cb-num-blocks={_KV_BLOCKS}", "--cb-block-size=32")
        urls = {
            "pagewise": pagewise.url,
            "transformers": stack.enter_context(transformers_serve(model, folder, "transformers")),
            "transformers batching": stack.enter_context(transformers_serve(model, folder, "batching", *batching)),
        }
        versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
        path = args.json or str(folder / "record.json")
        for workload in args.workloads:
            results.append(measured(urls, model, workload, args, folder))
            numbers = {"versions": versions, "load_average": load_average, "results": results}
            write_record(path, numbers, device="cpu", dtype="float32")
        return table(json.loads(Path(path).read_text()))


if __name__ == "__main__":
    main()
