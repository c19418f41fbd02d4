"""Explains in plain sentences how a request spent its time, and where its cached prefix was lost."""

from collections.abc import Iterator
from datetime import datetime

from pagewise_shared.reports import (
    Event,
    Interruption,
    LeftPrefix,
    LostPrefix,
    Move,
    NoSnapshot,
    NoWindow,
    OtherCache,
    RequestName,
    RequestReport,
    Share,
)

_LEAST_SECONDS = 1e-3
_MOST_EVENTS = 16
_SLOW_CLIENT_SECONDS, _SLOW_CLIENT_SHARE = 10e-3, 0.01
"""A client is called slow when the answer waited for it for so long, and for this share of the request's time."""

_SNAPSHOTS = {"full": "KV", "latent": "latents", "window": "windows", "chunk": "chunks", "state": "states"}
"""The content of a group's blocks that a sequence needs to begin behind a prefix, by their kind."""

_REASONS = {
    "decode": "its prompt was computed, and {executor} does not decode",
    "drain": "{executor} was stopped",
    "rejoined": "{executor} joined anew",
    "lost": "{executor} could not be reached any more",
    "stalled": "a step or a copy of {executor} did not return in time",
    "misbehaved": "what {executor} sent made no sense",
    "revoked": "the key of {executor} was revoked",
    "failed": "the scheduler failed in its work for {executor}",
}


def sentences(report: RequestReport) -> list[str]:
    """Return the life of a request in order, in whole sentences."""
    return [
        *_overview(report),
        *_placements(report),
        *_waiting(report),
        *_cache(report),
        *_events(report),
        *_prefill(report),
        *(_move(one, report) for one in report.moves),
        *(_reset(one, report) for one in report.resets),
        *_decode(report),
    ]


def _events(report: RequestReport) -> Iterator[str]:
    for event in report.events[-_MOST_EVENTS:]:
        if event.reason is not None:
            yield _preemption(event, report)
        elif event.source != "device" or event.kind == "resumed":
            yield _recovery(event, report)


def delivery(blocked_seconds: float | None, total_seconds: float) -> str | None:
    """Return the sentence about how fast the client read, None if it read about as fast as the tokens came.

    ``blocked_seconds``: for which the answer waited for the client, None if that is not known. ``total_seconds``: from
    the arrival of the request to its end, or until now.
    """
    if blocked_seconds is None:
        return "How fast its client read is not known to this gateway, which has not served it lately."
    if blocked_seconds < max(_SLOW_CLIENT_SECONDS, _SLOW_CLIENT_SHARE * total_seconds):
        return None
    return f"Its answer waited {duration(blocked_seconds)} for its client, which read more slowly than the tokens came."


def duration(seconds: float) -> str:
    """Return a time span as people write it."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1.0:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def clock_time(seconds: float) -> str:
    """Return the time of day at the server, to the second; ``seconds``: since 1970."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")


def _at(report: RequestReport, at: float) -> str:
    return f"At {clock_time(report.arrived + at)}, {duration(max(0.0, at))} after its arrival,"


def _name(request: RequestName | None) -> str:
    return "another request" if request is None else f"request {request.request_id}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _tokens(number: int) -> str:
    return _count(number, "token")


def _of_others(shares: list[Share]) -> str:
    return ", ".join(f"{_name(one.request)} ({_tokens(one.tokens)})" for one in shares)


def _overview(report: RequestReport) -> Iterator[str]:
    when = f"It arrived at {clock_time(report.arrived)}"
    if report.queue_seconds is None:
        yield f"{when} and has not started: it has waited {duration(report.total_seconds)}."
        return
    parts, so_far = [f"{duration(report.queue_seconds)} before it ran"], "" if report.state == "ended" else " so far"
    first = report.first_token_seconds
    if first is not None:
        parts.append(f"{duration(first - report.queue_seconds)} until its first token")
        parts.append(f"{duration(report.total_seconds - first)} for its output of {_tokens(report.output_tokens)}")
    else:
        parts.append(f"{duration(report.total_seconds - report.queue_seconds)} without a token so far")
    yield f"{when} and took {duration(report.total_seconds)}{so_far}: {', '.join(parts)}."


def _placements(report: RequestReport) -> Iterator[str]:
    if places := [f"on {one.executor_id} after {duration(one.at)}" for one in report.executors]:
        yield f"It was placed {', then '.join(places)}."
    if report.finish_reason is not None:
        yield f"It ended with the finish reason {report.finish_reason}."


def _waiting(report: RequestReport) -> Iterator[str]:
    if report.resumed is not None:
        yield (
            f"At {clock_time(report.resumed)} it came from another scheduler, which had been restarted or was lost: "
            "its time there is not known any more, and its KV was found or computed again."
        )
    prefix = (
        f"while {_name(report.computes_prefix)} computed the prefix that both have in common, so that it was not "
        "computed twice"
    )
    behind = f": {_of_others(report.ahead)}" if report.ahead else ""
    texts = {
        "rows": "because other sequences had all rows of the executor (--max-num-seqs)",
        "memory": "because too few blocks of the executor's KV memory were free for its prompt",
        "prefill": f"because the steps computed the prompts of others{behind}",
        "turn": "because others in the queue were next",
        "step": f"for steps in flight that computed the prompts of others{behind}"
        if report.ahead
        else "for steps in flight to return",
        "prefix": prefix,
        "grammar": "until the executor had compiled its grammar",
        "adapter": "until the executor had loaded its adapter",
        "no executor": "because there was no executor that could take it",
        "restart": "for the executors to come back after a restart of the scheduler",
        "storage": "for the answer how much of its prompt was in storage",
    }
    for cause, seconds in sorted(report.waits.items(), key=lambda wait: -wait[1]):
        if seconds >= _LEAST_SECONDS:
            yield f"It waited {duration(seconds)} {texts[cause]}."


def _cache(report: RequestReport) -> Iterator[str]:
    if report.queue_seconds is None:
        return
    found = sum(report.cached_tokens.values())
    missing = report.prompt_tokens - found
    lying = ", ".join(f"{tokens:,} {_location(source)}" for source, tokens in report.cached_tokens.items() if tokens)
    yield (
        f"Of the {_tokens(report.prompt_tokens)} of its prompt, {found:,} came from the cache ({lying}), and "
        f"{missing:,} had to be computed."
        if found
        else f"Nothing of its prompt of {_tokens(missing)} came from the cache: all of it had to be computed."
    )
    if report.not_asked:
        yield "The cache was not used, because log-probabilities of the prompt come from computing it."
    if report.no_window is not None:
        yield from _no_window(report.no_window)
    for lost in report.lost:
        yield _lost(lost)
    if report.left is not None:
        yield _left(report.left)
    if report.other_cache is not None:
        yield _other(report.other_cache)


def _other(other: OtherCache) -> str:
    begin, by = f"Its first {_tokens(other.tokens)} are cached for", f"(by {_name(other.cached_by)})"
    if other.kind != "adapter":
        return f"{begin} another cache salt or API key {by}, whose KV this request may not use."
    of = f"the adapter {other.adapter}" if other.adapter else "the model without an adapter"
    return f"{begin} {of} {by}, whose KV differs."


def _no_window(lacks: NoWindow) -> Iterator[str]:
    what = " and ".join(dict.fromkeys(_SNAPSHOTS[one.kind] for one in lacks.lacking)) or "windows"
    yield (
        f"Its prefix was there, its {what} were not: {_tokens(lacks.tokens)} of its prompt, from token "
        f"{lacks.position:,} on, had been cached, the last of them by {_name(lacks.cached_by)}, but the {what} with "
        f"which a sequence begins behind them were in no tier. So it could begin at token {lacks.position:,}."
    )
    yield from dict.fromkeys(_no_snapshot(one, lacks.due) for one in lacks.lacking)


def _no_snapshot(lacks: NoSnapshot, due: int) -> str:
    what, lost = _SNAPSHOTS[lacks.kind], lacks.lost
    begin = f"No {what} are known to have been kept there"
    if lost is not None:
        begin = f"The {what} behind token {lost.position:,}, of {_name(lost.cached_by)}, were {_how_lost(lost)}"
    if lacks.retaken is not None:
        return f"{begin}. They were taken again at {clock_time(lacks.retaken)}."
    return (
        f"{begin}. This request keeps {what} behind token {due:,}, where later ones can begin." if due else f"{begin}."
    )


def _left(left: LeftPrefix) -> str:
    text = f"Its prompt is the same as the cached one of {_name(left.cached_by)} up to token {left.position:,}, and "
    if left.compared > 1 and left.equal * 2 > left.compared:
        differ = left.compared - left.equal
        text += (
            f"differs in {_tokens(differ)} of the next {left.compared:,}: the first different one makes all that "
            f"come after it different KV, although {left.beyond:,} are cached there."
        )
    else:
        are = "is" if left.beyond == 1 else "are"
        text += f"goes on differently from there, where {_tokens(left.beyond)} of the other one {are} cached."
    return text


def _location(source: str) -> str:
    return "at other executors" if source == "peer" else f"on the {source}"


def _lost(lost: LostPrefix) -> str:
    cached = "" if lost.cached_at is None else f" at {clock_time(lost.cached_at)}"
    run = f"{_tokens(lost.tokens)} of its prompt, from token {lost.position:,} on,"
    text = (
        f"{run} {'was' if lost.tokens == 1 else 'were'} cached by {_name(lost.cached_by)}{cached} "
        if lost.cached_by is not None
        else f"{run} had been cached "
    )
    return f"{text}and {_how_lost(lost)}."


def _how_lost(lost: LostPrefix) -> str:
    at, when = f" at {lost.executor_id}" if lost.executor_id else "", clock_time(lost.time)
    if lost.reason == "executor lost":
        return f"lost at {when} with the executor {lost.executor_id}"
    if lost.reason == "executor reset":
        return f"lost at {when}, when the executor {lost.executor_id} was reset after an error"
    if lost.reason == "cache reset":
        return f"released{at} at {when}, when an operator reset the cache"
    if lost.reason == "advice":
        return f"released{at} at {when} by advice of its client"
    if lost.reason == "corrupt":
        return f"dropped{at} at {when}, because they came back from the {lost.tier} with wrong content"
    many = lost.taker is not None and lost.num_takers > 1
    by = f"by the allocation of {_name(lost.taker)}" + (" and others that decode" if many else "")
    return f"evicted{at} at {when} {by}, {_eviction_reason(lost)}"


def _eviction_reason(lost: LostPrefix) -> str:
    if lost.policy == "CostAware":
        return "because their expected value was the least"
    if lost.policy == "EndedSession":
        return "because their session had ended, or had gone on without them"
    if lost.policy == "LeastRecentlyUsed":
        return "because they had not been used for the longest time"
    return f"because the policy {lost.policy} chose them first"


def _source(source: str, event: Event) -> str:
    place = f"at the executor {event.peer}" if source == "peer" and event.peer else _location(source)
    return f"{place} (in {event.dtypes[source]})" if source in event.dtypes else place


def _recovery(event: Event, report: RequestReport) -> str:
    begin = f"{_at(report, event.at)} it " + ("went on" if event.kind == "resumed" else "started")
    begin += f" with {_tokens(event.device_tokens)} of KV on the device"
    if event.source == "device":
        return begin + ", and the rest was computed again."
    place = " and ".join(_source(one, event) for one in event.sources or [event.source or ""])
    took = "" if event.seconds is None else f", which took {duration(event.seconds)}"
    predicted = event.predicted_seconds.get(event.method or "")
    expected = "" if predicted is None else f" ({duration(predicted)} had been predicted)"
    method = {
        "load": f"{event.loaded_tokens:,} were loaded from where they lay {place}",
        "recompute": f"{event.found_tokens:,} more of them lay {place}, and were computed again, because that was "
        "predicted to be faster",
        "both": f"{event.found_tokens:,} more of them lay {place}: {event.loaded_tokens:,} were loaded while the "
        "others were computed",
    }.get(event.method or "", event.method)
    return f"{begin}; {method}{took}{expected}."


def _prefill(report: RequestReport) -> Iterator[str]:
    if (phase := report.prefill) is None or report.queue_seconds is None:
        return
    others = (
        f", in which {_tokens(phase.others_tokens)} of the prompts of others were computed too"
        if phase.others_tokens
        else ""
    )
    were = "step was" if phase.steps == 1 else "steps were"
    yield (
        f"In the {duration(phase.seconds)} from its start to its first token, {phase.steps:,} {were} planned{others}."
    )


def _preemption(event: Event, report: RequestReport) -> str:
    again = "has not gone on yet" if event.seconds is None else f"went on after {duration(event.seconds)}"
    lost = "started over" if event.kind == "started over" else f"was preempted for {_name(event.by)}"
    return (
        f"{_at(report, event.at)} it {lost} ({event.reason}): it let go of "
        f"{_count(event.blocks, 'block')}, of which {event.freed:,} became free, and {again}."
    )


def _move(move: Move, report: RequestReport) -> str:
    why = _REASONS.get(move.reason, move.reason).format(executor=f"the executor {move.executor_id}")
    when = _at(report, move.at)
    if move.to is None:
        return f"{when} it left, because {why}: it has not been placed since."
    to = f"{move.to} again, which had come back," if move.to == move.executor_id else move.to
    after = "" if move.seconds is None else f" after {duration(move.seconds)}"
    back = move.next_token_seconds
    token = "no token of it has come since" if back is None else f"its next token came after {duration(back)}"
    return f"{when} it moved, because {why}: it was placed on {to}{after}, and {token}."


def _reset(event: Interruption, report: RequestReport) -> str:
    back = (
        "no step has come back from it since"
        if event.seconds is None
        else f"its first step after that came back {duration(event.seconds)} later"
    )
    when, lost = _at(report, event.at), " and lost all KV, which had to be computed again"
    effect = lost if event.ran else ", while it waited there"
    return f"{when} the executor {event.executor_id} was reset after an error{effect}; {back}."


def _decode(report: RequestReport) -> Iterator[str]:
    if (phase := report.decode) is not None and phase.others_tokens:
        yield (
            f"While its output was decoded, {_count(phase.steps, 'step')} ran, in which "
            f"{_tokens(phase.others_tokens)} of the prompts of others were computed too: steps that do so take longer."
        )
