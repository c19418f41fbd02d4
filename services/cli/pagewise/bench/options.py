"""The options of ``pagewise bench``; those that ``vllm bench serve`` has too are named as there."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagewise.bench.metrics import SLO_METRICS
from pagewise.bench.workloads import DATASETS

_ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_NUM_PROMPTS = 100
_PLOTS = (".svg", ".png", ".pdf")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; ends the process if they are wrong, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="pagewise bench",
        description="Put a load on an OpenAI-compatible server, or on several in turns, and print latencies, "
        "throughput and goodput. Prompts are random words of about the lengths asked for, which no cache knows from an "
        "earlier run.",
        epilog="docs/bench.md explains the workloads, the numbers and the results' JSON.",
    )
    _add_servers(parser)
    _add_workloads(parser)
    _add_load(parser)
    _add_results(parser)
    options = parser.parse_args(arguments)
    options.endpoint = options.endpoint or _ENDPOINTS[options.backend]
    if not options.endpoint.startswith("/"):
        parser.error(f"--endpoint {options.endpoint}: it is a path, such as /v1/completions")
    if options.dataset_name in ("custom", "trace") and options.dataset_path is None:
        parser.error(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")
    _check_duration(options, parser)
    for header in options.header or []:
        if "=" not in header:
            parser.error(f"--header {header}: write NAME=VALUE")
    for path in (options.plot, options.result_filename and options.result_dir / options.result_filename):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no directory {path.parent}")
    if options.plot is not None and options.plot.suffix.lower() not in _PLOTS:
        parser.error(f"--plot {options.plot}: figures are {', '.join(_PLOTS)}")
    return options


def _check_duration(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in how many requests there are; ends the process if they would have no end, and all start at once."""
    if options.num_prompts is not None:
        return
    if options.duration is None:
        options.num_prompts = _NUM_PROMPTS
    elif math.isinf(options.request_rate) and options.max_concurrency is None and options.dataset_name != "trace":
        parser.error("--duration needs --request-rate, --max-concurrency or --num-prompts, else all starts at once")


def _add_servers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--base-url",
        action="append",
        metavar="[NAME=]URL",
        help="a server; several are measured in turns and compared with the first (default: http://HOST:PORT)",
    )
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    group.add_argument(
        "--backend",
        choices=_ENDPOINTS,
        default="openai",
        help="completions, or openai-chat for chats (default: openai)",
    )
    group.add_argument("--endpoint", metavar="PATH", help="where requests go (default: that of the backend)")
    group.add_argument(
        "--model",
        action="append",
        help="name of the model, one for all servers or one for each (default: the first that /v1/models lists)",
    )
    group.add_argument(
        "--api-key-env",
        action="append",
        metavar="NAME",
        help="environment variable of the API key, one for all servers or one for each (default: PAGEWISE_API_KEY, "
        "else OPENAI_API_KEY)",
    )
    group.add_argument("--header", action="append", metavar="NAME=VALUE", help="sent with every request")
    group.add_argument("--insecure", action="store_true", help="do not verify certificates")
    group.add_argument(
        "--ready-check-timeout-sec", type=_not_negative, default=0.0, metavar="S", help="wait for servers (default: 0)"
    )
    group.add_argument("--request-timeout", type=_positive, default=3600.0, metavar="S", help="(default: 3600)")


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="what is asked (default: random)")
    add("--dataset-path", type=Path, metavar="FILE", help="of custom, sharegpt and trace; .gz too")
    add(
        "--num-prompts",
        type=_count,
        metavar="N",
        help="requests (default: 100; with --duration, as many as it takes, or all of a file)",
    )
    add("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    add("--salt", help="of the words of prompts (default: another one in each run, so that no cache knows them)")
    _add_lengths(add)
    add(
        "--think-time",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="mean pause before a further turn (default: 0)",
    )
    add(
        "--length-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="times ShareGPT's and a trace's lengths (default: 1)",
    )
    add("--trace-speed", type=_positive, default=1.0, metavar="X", help="a trace X times as fast (default: 1)")
    add(
        "--tokens-per-word",
        type=_positive,
        metavar="X",
        help="of the random words (default: what the first server counts)",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let outputs be as long as asked for, where servers support it (default: yes)",
    )
    add("--temperature", type=_not_negative, default=0.0, help="(default: 0)")
    add("--extra-body", type=_object, default={}, metavar="JSON", help="further fields of every request")


def _add_lengths(add: Callable[..., object]) -> None:
    for name, default, text in (
        ("random-input-len", 1024, "tokens of each prompt"),
        ("random-output-len", 128, "tokens of each output"),
        ("prefix-repetition-prefix-len", 256, "tokens of each shared prefix"),
        ("prefix-repetition-suffix-len", 256, "tokens of each question behind it"),
        ("prefix-repetition-num-prefixes", 10, "prefixes"),
        ("prefix-repetition-output-len", 128, "tokens of each output"),
        ("multi-turn-num-turns", 5, "turns of each session"),
        ("multi-turn-input-len", 128, "tokens of what a user says in a turn"),
        ("multi-turn-output-len", 128, "tokens of each answer"),
        ("custom-output-len", 256, "tokens of an output for which the file says nothing"),
    ):
        add(f"--{name}", type=_count, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--random-prefix-len", type=_natural, default=0, metavar="N", help="tokens that all prompts share (default: 0)")
    add("--multi-turn-prefix-len", type=_natural, default=0, metavar="N", help="the same of all sessions (default: 0)")
    add(
        "--random-range-ratio",
        type=_share,
        default=0.0,
        metavar="R",
        help="lengths are uniform from (1-R) to (1+R) times those given (default: 0)",
    )
    add("--sharegpt-output-len", type=_count, metavar="N", help="tokens of each output, instead of ShareGPT's")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add(
        "--request-rate",
        type=_rate,
        default=math.inf,
        metavar="R",
        help="requests per second, of multi-turn sessions that begin (default: inf, all at once)",
    )
    add(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier (default: 1)",
    )
    add(
        "--max-concurrency", type=_count, metavar="N", help="requests, or sessions, at once at most (default: no limit)"
    )
    add(
        "--duration",
        type=_positive,
        metavar="S",
        help="start no request after S seconds; those that run are waited for (default: no limit)",
    )
    add("--num-warmups", type=_natural, default=3, metavar="N", help="requests before each load (default: 3)")
    add("--rounds", type=_count, default=1, metavar="N", help="how often each server is measured (default: 1)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        type=_slo,
        default=[],
        metavar="METRIC:MS",
        help=f"bounds that a request has to meet, in milliseconds, of {', '.join(SLO_METRICS)}: ttft:500 tpot:50",
    )
    add(
        "--metric-percentiles",
        type=_percentiles,
        default=[90.0, 99.0],
        metavar="P,...",
        help="beside mean and median (default: 90,99)",
    )
    add("--save-result", action="store_true", help="write a JSON file")
    add("--result-filename", metavar="NAME", help="its name, which also asks for it (default: with the time)")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="where (default: here)")
    add("--save-detailed", action="store_true", help="with the times of every request")
    add("--plot", type=Path, metavar="FILE", help="draw latencies and throughput, as .svg, .png or .pdf")
    add("--disable-tqdm", action="store_true", help="show no progress")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("at least 0")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("a number above 0")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _rate(text: str) -> float:
    return math.inf if text == "inf" else _positive(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("from 0 to below 1")
    return value


def _slo(text: str) -> tuple[str, float]:
    name, _, bound = text.partition(":")
    if name not in SLO_METRICS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SLO_METRICS)}: write ttft:500")
    return name, _positive(bound)


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError("from 0 to 100, such as 50,90,99")
    return values


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object")
    return value
