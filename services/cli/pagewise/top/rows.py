"""Formats executors and requests as text."""

from typing import Any, NamedTuple

from rich.text import Text

from pagewise.memory_map import kind_of

STATES = (
    ("in_use", "in use", "█", "dodger_blue1"),
    ("lent", "lent", "▓", "medium_purple1"),
    ("copying", "copying", "▒", "orange1"),
    ("cached", "cached", "░", "green3"),
    ("free", "free", "·", "grey50"),
)
"""Of blocks: key, name, a character of its own (for terminals without colours), and colour."""

_RATES = ("evicted", "demoted", "dropped", "stored", "loaded", "fetched", "copied")


class Column(NamedTuple):
    """A column of the requests' table: its title and the field by which it is sorted."""

    title: str
    field: str


COLUMNS = (
    Column("request", "request_id"),
    Column("state", "status"),
    Column("executor", "executor_id"),
    Column("prompt", "prompt_tokens"),
    Column("cached", "num_cached_tokens"),
    Column("output", "output_tokens"),
    Column("blocks", "blocks"),
    Column("shared", "shared_blocks"),
    Column("preempted", "preemptions"),
    Column("age s", "arrived_seconds_ago"),
    Column("queue ms", "queue_seconds"),
    Column("TTFT ms", "first_token_seconds"),
)


def bar(counts: dict[str, int], width: int) -> Text:
    """Return a bar of ``width`` characters, divided as blocks are among the states; a state that has any has one."""
    total = sum(counts.values())
    text = Text()
    if not total:
        return Text("-" * width, "grey50")
    sizes = {key: count * width / total for key, count in counts.items()}
    cells = {key: max(1, int(size)) if size else 0 for key, size in sizes.items()}
    largest = max(cells, key=lambda key: cells[key])
    cells[largest] += width - sum(cells.values())
    for key, _, character, colour in STATES:
        text.append(character * cells.get(key, 0), colour)
    return text


def legend() -> Text:
    """Return the meaning of the characters of bars."""
    text = Text()
    for _, name, character, colour in STATES:
        text.append(f"{character} ", colour).append(f"{name}  ")
    return text


def summary(fleet: dict[str, Any]) -> Text:
    """Return the line about the whole fleet."""
    scheduler = fleet["scheduler"]
    ready = sum(one["state"] == "ready" for one in fleet["executors"])
    hits = [f"{tier} {share:.0%}" for tier, share in scheduler["hit_rate"].items() if share]
    text = Text.assemble(
        (f"{fleet['model']}", "bold"),
        f"  {ready} of {len(fleet['executors'])} executors ready, {len(fleet['gateways'])} gateways  ",
        (f"{scheduler['requests_running']} running, {scheduler['requests_waiting']} waiting", "bold"),
        f"  {_rate(scheduler['tokens_per_second'])} tokens/s out, {_rate(scheduler['prompt_tokens_per_second'])} in",
        f"  hits: {', '.join(hits) or 'none'}",
    )
    if scheduler["unplaced"]:
        text.append(f"  {scheduler['unplaced']} unplaced", "bold red")
    return text


def executors(fleet: dict[str, Any], width: int) -> Text:
    """Return the lines about executors: a bar for the device and for each tier below, load, and events of blocks."""
    lines = []
    for one in fleet["executors"]:
        counts = one["counts"]
        total = one["device"]["num_blocks"]
        head = Text.assemble(
            (f"{one['executor_id'][:24]:<24}", "bold"),
            (f" {one['state']:<9}", "" if one["state"] == "ready" else "bold yellow"),
            f" {one['running']:>4} running {one['waiting']:>4} waiting {one['preemptions']:>5} preempted"
            f" {_rate(one['tokens_per_second']):>8} tokens/s",
        )
        lines += [head, _tier("device", bar(counts, max(10, width - 34)), total - counts["free"], total)]
        for name, tier in one["tiers"].items():
            held = {"cached": tier["used"], "free": tier["num_blocks"] - tier["used"]}
            lines.append(_tier(name, bar(held, max(10, width - 34)), tier["used"], tier["num_blocks"]))
        for name, tier in (("device", one["device"]), *one["tiers"].items()):
            lines += [_groups(name, groups)] if (groups := tier.get("groups")) else []
        rates = [f"{name} {one['rates'][name]:,.0f}" for name in _RATES if one["rates"].get(name)]
        lines.append(Text(f"  blocks/s: {', '.join(rates) or 'none move'}", "grey62"))
    lines += map(_key, fleet.get("keys", ()))
    return Text("\n").join(lines) if lines else Text("No executor has joined.", "bold yellow")


def _key(one: dict[str, Any]) -> Text:
    """Return the line about an API key: its cached KV and budgets by tier, and the benefit of one GiB more."""
    text = Text.assemble((f"{one['name'][:24] or '(no key)':<24}", "bold"))
    for tier, use in one["memory"].items():
        bounds = ", ".join(f"{bound} {_gib(use[bound])}" for bound in ("min", "low", "high") if use[bound])
        text.append(f" {tier} {_gib(use['used'])} GiB" + (f" ({bounds})" if bounds else ""))
    if spared := one["spared_by_next_gib"]:
        text.append(f" the next GiB would have saved {spared / 60:,.1f} tokens/s")
    return text


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"


def _groups(name: str, groups: list[dict[str, Any]]) -> Text:
    """Return the line about the groups of layers in a tier."""
    pages = [f"{kind_of(one)} {one['in_use'] + one['cached']:,}" for one in groups]
    snapshots = sum(one["snapshots"] for one in groups)
    return Text(f"  {name[:7]:<7} pages: {', '.join(pages)}; snapshots: {snapshots:,}", "grey62")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _tier(name: str, drawn: Text, used: int, total: int) -> Text:
    return Text.assemble(f"  {name[:7]:<7} ", drawn, f" {used:>9,} of {total:,}")


def cells(request: dict[str, Any]) -> list[Text]:
    """Return the cells of a request, one for each of ``COLUMNS``."""
    shown = []
    for column in COLUMNS:
        value = request.get(column.field)
        match column.field:
            case "request_id":
                shown.append(Text((request.get("client_request_id") or str(value))[:32]))
            case "status":
                text = request.get("finish_reason") or str(value)
                shown.append(
                    Text(text, {"decode": "green3", "prefill": "dodger_blue1", "waiting": "yellow"}.get(text, "grey62"))
                )
            case "arrived_seconds_ago":
                shown.append(Text(f"{value:.1f}", justify="right"))
            case "queue_seconds" | "first_token_seconds":
                shown.append(Text("-" if value is None else f"{1e3 * value:.0f}", justify="right"))
            case "executor_id":
                shown.append(Text(str(value or "-")))
            case _:
                shown.append(Text(f"{value:,}" if isinstance(value, int) else "-", justify="right"))
    return shown


def chosen(requests: dict[str, Any], wanted: str, column: Column | None, descending: bool) -> list[dict[str, Any]]:
    """Return the requests in which ``wanted`` occurs (ids, key, executor or state), in the order of a column.

    Without a column: running, waiting and ended requests, in this order.
    """
    every = [*requests["running"], *requests["waiting"], *requests["ended"]]
    names = ("request_id", "client_request_id", "key", "executor_id", "status", "finish_reason")
    found = [one for one in every if any(wanted in str(one.get(name) or "") for name in names)]
    if column is None:
        return found
    known = [one for one in found if one.get(column.field) is not None]
    if column.field == "request_id":  # this column shows the client's own id, if there is one
        known.sort(key=lambda one: one.get("client_request_id") or one["request_id"], reverse=descending)
    else:
        known.sort(key=lambda one: one[column.field], reverse=descending)
    return known + [one for one in found if one.get(column.field) is None]
