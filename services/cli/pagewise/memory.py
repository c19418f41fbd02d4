"""``pagewise vmstat`` and ``pagewise pmap``: statistics of KV memory, in a terminal."""

import argparse
import itertools
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from pagewise_shared.protocol import POOL_TIERS

from pagewise.client import add_url, get
from pagewise.memory_map import kind_of, memory_map

_LOWER_TIERS = POOL_TIERS[1:]
_HEADER_EVERY = 20
_COUNTED = ("evicted", "demoted", "dropped", "stored", "loaded", "fetched", "copied")
_SNAPSHOTS = ("taken", "used", "unused", "demoted", "loaded")


def vmstat(arguments: Sequence[str]) -> int:
    """Print a line of memory statistics at an interval; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise vmstat",
        description="Print sequences, blocks by state, and events of blocks per second, summed over all executors; for "
        "models with windows or states also pages by kind of layers, and snapshots since the line before. The first "
        "line counts events since the executors joined.",
    )
    parser.add_argument("interval", nargs="?", type=_positive, default=1.0, help="seconds between lines (default: 1)")
    parser.add_argument("count", nargs="?", type=int, default=0, help="lines to print (default: until interrupted)")
    add_url(parser)
    options = parser.parse_args(arguments)
    before: dict[str, int] = {}
    kinds: list[str] = []
    for number in range(options.count) if options.count > 0 else itertools.count():
        if number:
            time.sleep(options.interval)
        executors = get(options.url, "/debug/memory?limit=1")["executors"]
        known = [group["kind"] for executor in executors for group in executor["device"].get("groups", [])]
        if number % _HEADER_EVERY == 0 or set(known) - set(kinds):
            kinds = list(dict.fromkeys([*kinds, *known]))
            print(_vmstat_header(kinds))
        names = [*_COUNTED, *(f"snapshots_{name}" for name in _SNAPSHOTS)]
        now = {name: sum(executor["counters"].get(name, 0) for executor in executors) for name in names}
        # An executor that joins again starts its counters at 0.
        seconds = options.interval if before else 1.0
        more = [max(0, now[name] - before.get(name, 0)) for name in names]
        line = _vmstat_line(executors, [count / seconds for count in more[: len(_COUNTED)]])
        print(line + _group_columns(executors, kinds, more[len(_COUNTED) :]), flush=True)
        before = now
    return 0


def pmap(arguments: Sequence[str]) -> int:
    """Print the blocks of one request and their history, or all memory; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise pmap",
        description="Print which blocks a request holds and shares, which it lost, and how they were recovered. The "
        "last requests that have ended are known too. Without a request: the memory of each executor by tier and group "
        "of layers, and its prefix tree with the snapshots of windows and states.",
    )
    parser.add_argument(
        "request",
        nargs="?",
        help="id of the request: that of the response (cmpl-... or chatcmpl-...), or the X-Request-Id it was sent with",
    )
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="blocks, or runs of the tree, to list (default: 100)"
    )
    add_url(parser)
    options = parser.parse_args(arguments)
    if options.request is None:
        for number, executor in enumerate(get(options.url, f"/debug/memory?limit={options.limit}")["executors"]):
            print("\n" * (number > 0) + "\n".join(memory_map(executor)))
        return 0
    name = urllib.parse.quote(options.request, safe="")
    report = get(options.url, f"/debug/requests/{name}?limit={options.limit}")
    for line in description(report):
        print(line)
    return 0


def description(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a request's times, blocks and history. ``report``: the answer of /debug/requests/ID."""
    yield from _request_lines(report)
    for sequence in report["sequences"]:
        yield ""
        own = [event for event in report.get("events", []) if event["sequence"] == sequence["index"]]
        yield from _sequence_lines(sequence, own, report["arrived_seconds_ago"])


def _request_lines(report: dict[str, Any]) -> Iterator[str]:
    names = {"client's id": report["client_request_id"], "key": report["key"]}
    yield "  ".join([f"request {report['request_id']}", *(f"{what} {name}" for what, name in names.items() if name)])
    first = report["first_token_seconds"]
    yield (
        f"  arrived {report['arrived_seconds_ago']:.3f} s ago, {_waited(report['queue_seconds'])}, "
        + ("no token yet" if first is None else f"first token after {1e3 * first:.1f} ms")
    )
    age = report["arrived_seconds_ago"]
    where = [f"{one['executor_id']} {age - one['at']:.3f} s ago" for one in reversed(report["executors"])]
    yield f"  placed on {', before that on '.join(where) or 'no executor'}"
    cached = dict(report["cached_tokens"])
    peer = cached.pop("peer")
    lying = "".join(f"{tokens} on the {name}, " for name, tokens in cached.items())
    yield f"  cached tokens: {lying}{peer} at other executors"
    if chunks := [str(one["tokens"]) for one in report.get("chunks", [])]:
        yield f"  prefilled in {len(chunks)} chunk{'s' if len(chunks) > 1 else ''} of {', '.join(chunks)} tokens"


def _waited(seconds: float | None) -> str:
    return "waits in the queue" if seconds is None else f"{1e3 * seconds:.1f} ms in the queue"


def _vmstat_header(kinds: list[str]) -> str:
    """``kinds``: of groups of layers; none: tiers count blocks, and there are no snapshots."""
    unit = "pages" if kinds else "blocks"
    tiers = [f"{name} {unit}" for name in _LOWER_TIERS]
    groups = f" {'used pages':-^{8 * len(kinds) - 1}} {'snapshots since the last line':-^39}" if kinds else ""
    return (
        f"  -sequences- {f'device {unit}':-^31} "
        + "".join(f"{name:-^15} " for name in tiers)
        + f"{'blocks per second':-^55}{groups}\n"
        + "   run   wait    free  cached  in use    lent"
        + "    free    used" * len(tiers)
        + "   evict  demote    drop   store    load   fetch    copy"
        + ("".join(f"{one:>8}" for one in (*kinds, "take", "use", "unused", "demote", "load")) if kinds else "")
    )


def _group_columns(executors: list[dict[str, Any]], kinds: list[str], snapshots: list[int]) -> str:
    """Return the device's pages by kind, and the numbers of ``snapshots``; nothing where layers form one group."""
    if not kinds:
        return ""
    groups = [group for executor in executors for group in executor["device"].get("groups", [])]
    pages = [sum(one["in_use"] + one["cached"] for one in groups if one["kind"] == kind) for kind in kinds]
    return "".join(f"{number:>8}" for number in (*pages, *snapshots))


def _vmstat_line(executors: list[dict[str, Any]], rates: list[float]) -> str:
    def total(*path: str) -> int:
        values: list[Any] = executors
        for name in path:
            values = [value[name] for value in values]
        return sum(values)

    lower = []
    for name in _LOWER_TIERS:
        tiers = [executor["tiers"][name] for executor in executors if name in executor["tiers"]]
        used = sum(tier["used"] for tier in tiers)
        lower += [sum(tier["num_blocks"] for tier in tiers) - used, used]
    numbers = [
        total("device", "free"),
        total("device", "cached"),
        total("device", "in_use"),
        total("device", "lent"),
        *lower,
        *(round(rate) for rate in rates),
    ]
    return f"{total('running'):>6} {total('waiting'):>6}" + "".join(f"{number:>8}" for number in numbers)


def _sequence_lines(sequence: dict[str, Any], events: list[dict[str, Any]], age: float) -> Iterator[str]:
    end = f" ({sequence['finish_reason']})" if sequence.get("finish_reason") else ""
    yield (
        f"sequence {sequence['index']}: {sequence['status']}{end}, "
        f"{sequence['num_prompt_tokens']} + {sequence['num_output_tokens']} tokens, "
        f"{sequence['num_blocks']} blocks, {sequence['shared']} of them shared, "
        f"preempted {sequence['preemptions']} times"
    )
    yield from map(_table_line, sequence.get("groups", []))
    for event in events:
        text = _recovery(event) if "method" in event else _loss(event)
        yield f"  {age - event['at']:9.3f} s ago  {event['kind']:<10} {text}"
    blocks = sequence.get("blocks", [])
    if blocks:
        yield "   index   block" + "".join(f"{name:>8}" for name in _LOWER_TIERS) + "    held by  hash"
    for block in blocks:
        copies = block.get("copies", {})
        lower = "".join(f"{copies.get(name, '-'):>8}" for name in _LOWER_TIERS)
        state = block["hash"][:16] if block.get("hash") else "cached" if block.get("cached") else "its own"
        yield f"  {block['index']:>6}  {block['block']:>6}{lower}  {block['references']:>8}  {state}"
    if sequence.get("truncated"):
        yield "  ... (more with --limit)"


def _table_line(table: dict[str, Any]) -> str:
    text = f"  {kind_of(table):<16}{table['num_blocks']:>8,} blocks{table['pages']:>8,} pages"
    if tokens := table.get("tokens"):
        return f"{text}  kept behind {' and '.join(map(str, tokens))} tokens"
    return f"{text}  from token {first:,} on" if (first := table.get("first")) else text


def _loss(event: dict[str, Any]) -> str:
    by = f"for request {event['by']['request_id']}, " if event.get("by") else ""
    return f"{by}{event['reason']}: {event.get('blocks', 0)} blocks, {event.get('freed', 0)} of them freed"


def _recovery(event: dict[str, Any]) -> str:
    text = f"{event['method']}: {event.get('device_tokens', 0)} tokens on the device"
    if event["source"] != POOL_TIERS[0]:
        peer = event.get("peer") or "another executor"
        places = [peer if source == "peer" else f"the {source}" for source in event.get("sources") or [event["source"]]]
        text += f", {event.get('loaded_tokens', 0)} from {' and '.join(places)}"
    if predicted := event.get("predicted_seconds"):
        times = ", ".join(f"{method} {1e3 * seconds:.1f} ms" for method, seconds in predicted.items())
        text += f"; predicted {times}"
        if (seconds := event.get("seconds")) is not None:
            text += f"; took {1e3 * seconds:.1f} ms"
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 86_400:
        raise argparse.ArgumentTypeError("must be a number of seconds above 0 and below a day")
    return value
