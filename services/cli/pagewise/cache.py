"""``pagewise cache``: operators list cached prefixes, release cached blocks, and advise on sessions."""

import argparse
import json
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pagewise_shared.logs import printable

from pagewise.client import add_url, connect, get

Lines = Callable[[dict[str, Any]], Iterator[str]]
"""Yields the lines about one executor, from its part of the answer."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_ADVICE = {
    "pin": ("pin", "keep the KV of sessions for a time, within the share of the API key"),
    "unpin": ("unpin", "end a pin"),
    "prefetch": ("willneed", "say that the next turn of sessions is about to come, so that their KV is kept for it"),
    "cold": ("cold", "move the KV of sessions from the device to a slower tier now"),
    "forget": ("dontneed", "release the KV of sessions, as far as nothing else uses it"),
    "end": ("end", "say that sessions have ended: their KV is the first to go"),
}
"""Verb of the command -> the advice of ``POST /v1/cache/advice``, and the help."""
_RESET_SECONDS = 310.0
"""Longer than a gateway waits until blocks on disks and in stores are deleted."""
_TIMES = {"pin": "keep it for so long", "prefetch": "the turn comes within that time"}


def cache(arguments: Sequence[str]) -> int:
    """Run a verb of ``pagewise cache``; returns the process's exit code."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewise cache",
        description="Show cached prefixes and release them, or advise on sessions. Where there are API keys, list and "
        "drop need an operator's key in PAGEWISE_API_KEY, and the other verbs are about sessions of the key there.",
    )
    chosen = argparse.ArgumentParser(add_help=False)
    which = chosen.add_mutually_exclusive_group()
    which.add_argument("--key", metavar="NAME", help="of the requests with the API key NAME")
    which.add_argument(
        "--salt",
        help="of the requests with this cache salt: key:NAME, group:NAME or all, and a request's own cache_salt behind "
        "a slash",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    shown = verbs.add_parser(
        "list",
        parents=[chosen],
        help="print cached prefixes by the blocks with which they begin: salt, size by tier, last use",
    )
    shown.add_argument("--limit", type=int, default=20, metavar="N", help="prefixes of each executor (default: 20)")
    shown.set_defaults(run=_list)
    dropped = verbs.add_parser(
        "drop",
        parents=[chosen],
        help="release cached blocks that no sequence uses, on devices and in host memory",
    )
    dropped.add_argument("--external", action="store_true", help="delete them on disks and in stores too")
    dropped.add_argument("--all", action="store_true", help="of all requests")
    dropped.set_defaults(run=_drop, parser=dropped)
    advised = [_add_advice(verbs, verb, *advice) for verb, advice in _ADVICE.items()]
    for each in (shown, dropped, *advised):
        each.add_argument("--json", action="store_true", help="print the answer as JSON")
        add_url(each)
    return parser


def _add_advice(verbs: Any, verb: str, advice: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(verb, help=about, description=about[0].upper() + about[1:] + ".")
    parser.add_argument("sessions", nargs="+", metavar="SESSION", help="as requests name it in session_id")
    parser.add_argument("--cache-salt", help="the cache_salt of its requests, if they have one")
    if verb in _TIMES:
        parser.add_argument("--ttl", metavar="TIME", help=f"{_TIMES[verb]}: 90s, 5m, 1h")
    parser.set_defaults(run=_advise, advice=advice)
    return parser


def _list(options: argparse.Namespace) -> int:
    chosen = _chosen(options) | {"limit": str(options.limit)}
    report = get(options.url, f"/debug/cache?{urllib.parse.urlencode(chosen)}")
    _print(report, options, _listed)
    return 0


def _drop(options: argparse.Namespace) -> int:
    chosen = _chosen(options)
    if bool(chosen) == options.all:
        options.parser.error("give --key, --salt or --all")
    body = json.dumps({**chosen, "reset_external": options.external}).encode()
    with connect(options.url, "/reset_prefix_cache", body, _RESET_SECONDS) as answer:
        report = json.loads(answer.read())
    _print(report, options, _dropped)
    return int(any(executor["failed"] for executor in report["executors"]))


def _advise(options: argparse.Namespace) -> int:
    """Give advice on each session. Returns 1 if the advice on one of them is refused."""
    fields = {"advice": options.advice, "cache_salt": options.cache_salt, "ttl": getattr(options, "ttl", None)}
    given = {name: value for name, value in fields.items() if value is not None}
    answers: dict[str, dict[str, Any]] = {}
    for session in options.sessions:
        body = json.dumps({**given, "session_id": session}).encode()
        with connect(options.url, "/v1/cache/advice", body) as answer:
            answers[session] = json.loads(answer.read())
        if not options.json:
            print(f"{printable(session)}: {_outcome(answers[session])}")
    if options.json:
        print(json.dumps(answers, indent=2))
    return int(any(answer["outcome"] == "refused" for answer in answers.values()))


def _outcome(answer: dict[str, Any]) -> str:
    parts = [str(answer["outcome"])]
    if answer["outcome"] != "refused":
        parts.append(f"{answer['tokens']:,} tokens in {answer['blocks']:,} blocks")
    if answer["seconds"]:
        parts.append(f"for {answer['seconds']:g} s")
    return ", ".join(parts) + (f": {printable(answer['reason'])}" if answer["reason"] else "")


def _chosen(options: argparse.Namespace) -> dict[str, str]:
    given = {"key": options.key, "salt": options.salt}
    return {name: value for name, value in given.items() if value is not None}


def _print(report: dict[str, Any], options: argparse.Namespace, lines: Lines) -> None:
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for executor in report["executors"]:
        print("\n".join(lines(executor)))


def _listed(executor: dict[str, Any]) -> Iterator[str]:
    yield f"{executor['executor_id']}: {len(executor['prefixes'])} beginnings of cached prefixes"
    yield f"  {'tokens':>8}{'blocks':>8}{'in use':>8}{'uses':>6}{'last used':>12}  tiers; salt; first request"
    for one in executor["prefixes"]:
        age = one.get("last_used_seconds")
        tiers = ", ".join(f"{name} {_size(size) or number}" for (name, number), size in _by_tier(one))
        names = "; ".join(
            f"{what} {printable(one[name])}".strip()
            for what, name in (("", "salt"), ("adapter", "adapter"), ("", "request_id"))
            if one.get(name)
        )
        yield (
            f"  {one['num_tokens']:>8,}{one['num_blocks']:>8,}{one.get('in_use', 0):>8,}{_uses(one.get('uses')):>6}"
            f"{'-' if age is None else f'{age:.1f} s ago':>12}  {tiers}{'; ' if names else ''}{names}"
        )
    if executor["truncated"]:
        yield "  ... (more with --limit)"


def _by_tier(prefixes: dict[str, Any]) -> Iterator[tuple[tuple[str, int], int]]:
    return zip(prefixes["tiers"].items(), prefixes["bytes"].values(), strict=True)


def _size(size: int) -> str:
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if size >= factor), ("B", 1))
    return f"{size / factor:.1f} {unit}" if size else ""


def _uses(uses: int | None) -> str:
    return "-" if uses is None else "4+" if uses >= 4 else str(uses)


def _dropped(executor: dict[str, Any]) -> Iterator[str]:
    released = ", ".join(f"{number:,} on the {name}" for name, number in executor["released"].items())
    stay = f"{executor['in_use']:,} blocks stay in use"
    yield f"{executor['executor_id']}: {executor['unit']} released: {released}; {stay}"
    if executor["kept"]:
        yield f"  the {' and the '.join(executor['kept'])} tier is as it was: --external deletes blocks there"
    for name, why in executor["failed"].items():
        yield f"  not all blocks of the {name} tier are deleted: {printable(why)}"
