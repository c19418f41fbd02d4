"""Says in plain sentences what an explanation's facts are."""

from collections.abc import Iterator
from datetime import datetime

from pagewise_scheduler.core.explanation import (
    Explanation,
    Interruption,
    LeftPrefix,
    LostPrefix,
    Move,
    OtherCache,
    Preemption,
    RecoveredPrefix,
    Share,
    Who,
)
from pagewise_scheduler.core.requests.timeline import BLOCKS_CORRUPT, LENDER_GONE

_LEAST_SECONDS = 1e-3

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


def sentences(told: Explanation) -> list[str]:
    """What happened, in order, each sentence whole."""
    return [
        *_overview(told),
        *_waiting(told),
        *_cache(told),
        *(_recovery(one) for one in told.recoveries if one.source != "device" or one.resumed),
        *_prefill(told),
        *(_preemption(one) for one in told.preemptions),
        *(_move(one) for one in told.moves),
        *(_reset(one) for one in told.resets),
        *_decode(told),
    ]


def duration(seconds: float) -> str:
    """A time span as people write it."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1.0:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def clock_time(seconds: float) -> str:
    """The time of day at the server, to the second; ``seconds``: since 1970."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")


def _who(who: Who | None) -> str:
    return "another request" if who is None else f"request {who.request_id}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _tokens(number: int) -> str:
    return _count(number, "token")


def _of_others(shares: list[Share]) -> str:
    return ", ".join(f"{_who(one.request)} ({_tokens(one.tokens)})" for one in shares)


def _overview(told: Explanation) -> Iterator[str]:
    when = f"It arrived at {clock_time(told.arrived)}"
    if told.queue_seconds is None:
        yield f"{when} and has not started: it has waited {duration(told.total_seconds)}."
        return
    parts, so_far = [f"{duration(told.queue_seconds)} before it ran"], "" if told.state == "ended" else " so far"
    first = told.first_token_seconds
    if first is not None:
        parts.append(f"{duration(first - told.queue_seconds)} until its first token")
        parts.append(f"{duration(told.total_seconds - first)} for its output of {_tokens(told.output_tokens)}")
    else:
        parts.append(f"{duration(told.total_seconds - told.queue_seconds)} without a token so far")
    yield f"{when} and took {duration(told.total_seconds)}{so_far}: {', '.join(parts)}."


def _waiting(told: Explanation) -> Iterator[str]:
    if told.resumed is not None:
        yield (
            f"At {clock_time(told.resumed)} it came from another scheduler, which had been restarted or was lost: what "
            "happened there is not known any more, and its KV was found or computed again."
        )
    prefix = (
        f"while {_who(told.computes_prefix)} computed the prefix that both have in common, so that it was not computed "
        "twice"
    )
    behind = f": {_of_others(told.ahead)}" if told.ahead else ""
    texts = {
        "rows": "because other sequences had all rows of the executor (--max-num-seqs)",
        "memory": "because too few blocks of the executor's KV memory were free for its prompt",
        "prefill": f"because the steps computed the prompts of others{behind}",
        "turn": "because others in the queue were next",
        "step": f"for steps in flight that computed the prompts of others{behind}"
        if told.ahead
        else "for steps in flight to return",
        "prefix": prefix,
        "grammar": "until the executor had compiled its grammar",
        "adapter": "until the executor had loaded its adapter",
        "no executor": "because there was no executor that could take it",
        "restart": "for the executors to come back after a restart of the scheduler",
        "storage": "for the answer how much of its prompt was in storage",
    }
    for cause, seconds in sorted(told.waits.items(), key=lambda wait: -wait[1]):
        if seconds >= _LEAST_SECONDS:
            yield f"It waited {duration(seconds)} {texts[cause]}."


def _cache(told: Explanation) -> Iterator[str]:
    if told.queue_seconds is None:
        return
    found = sum(told.cached_tokens.values())
    missing = told.prompt_tokens - found
    lying = ", ".join(f"{tokens:,} {_place(source)}" for source, tokens in told.cached_tokens.items() if tokens)
    yield (
        f"Of the {_tokens(told.prompt_tokens)} of its prompt, {found:,} came from the cache ({lying}), and "
        f"{missing:,} had to be computed."
        if found
        else f"Nothing of its prompt of {_tokens(missing)} came from the cache: all of it had to be computed."
    )
    if told.not_asked:
        yield "The cache was not used, because log-probabilities of the prompt come from computing it."
    for lost in told.lost:
        yield _lost(lost)
    if told.left is not None:
        yield _left(told.left)
    if told.other_cache is not None:
        yield _other(told.other_cache)


def _other(other: OtherCache) -> str:
    begin, by = f"Its first {_tokens(other.tokens)} are cached for", f"(by {_who(other.cached_by)})"
    if other.kind != "adapter":
        return f"{begin} another cache salt or API key {by}, whose KV this request may not use."
    of = f"the adapter {other.adapter}" if other.adapter else "the model without an adapter"
    return f"{begin} {of} {by}, whose KV differs."


def _left(left: LeftPrefix) -> str:
    text = f"Its prompt is the same as the cached one of {_who(left.cached_by)} up to token {left.position:,}, and "
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


def _place(source: str) -> str:
    return "at other executors" if source == "peer" else f"on the {source}"


def _lost(lost: LostPrefix) -> str:
    cached = "" if lost.cached_at is None else f" at {clock_time(lost.cached_at)}"
    at = f" at {lost.executor_id}" if lost.executor_id else ""
    run = f"{_tokens(lost.tokens)} of its prompt, from token {lost.position:,} on,"
    text = (
        f"{run} {'was' if lost.tokens == 1 else 'were'} cached by {_who(lost.cached_by)}{cached} "
        if lost.cached_by is not None
        else f"{run} had been cached "
    )
    when = clock_time(lost.time)
    if lost.reason == "executor lost":
        return f"{text}and lost at {when} with the executor {lost.executor_id}."
    if lost.reason == "executor reset":
        return f"{text}and lost at {when}, when the executor {lost.executor_id} was reset after an error."
    if lost.reason == "corrupt":
        return f"{text}and dropped{at} at {when}, because they came back from the {lost.tier} with wrong content."
    many = lost.taker is not None and lost.num_takers > 1
    by = f"by the allocation of {_who(lost.taker)}" + (" and others that decode" if many else "")
    return f"{text}and evicted{at} at {when} {by}, {_why_these(lost)}."


def _why_these(lost: LostPrefix) -> str:
    if lost.policy == "CostAware":
        return "because their expected value was the least"
    if lost.policy == "LeastRecentlyUsed":
        return "because they had not been used for the longest time"
    return f"because the policy {lost.policy} chose them first"


def _recovery(event: RecoveredPrefix) -> str:
    begin = f"At {clock_time(event.time)} it " + ("went on" if event.resumed else "started")
    begin += f" with {_tokens(event.device_tokens)} of KV on the device"
    if event.source == "device":
        return begin + ", and the rest was computed again."
    sources = event.sources or [event.source]
    place = " and ".join(
        f"at the executor {event.peer}" if one == "peer" and event.peer else _place(one) for one in sources
    )
    took = "" if event.seconds is None else f", which took {duration(event.seconds)}"
    predicted = event.predicted.get(event.method)
    expected = "" if predicted is None else f" ({duration(predicted)} had been predicted)"
    method = {
        "load": f"{event.loaded_tokens:,} were loaded from where they lay {place}",
        "recompute": f"{event.found_tokens:,} more of them lay {place}, and were computed again, because that was "
        "predicted to be faster",
        "both": f"{event.found_tokens:,} more of them lay {place}: {event.loaded_tokens:,} were loaded while the "
        "others were computed",
    }.get(event.method, event.method)
    return f"{begin}; {method}{took}{expected}."


def _prefill(told: Explanation) -> Iterator[str]:
    if (phase := told.prefill) is None or told.queue_seconds is None:
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


def _preemption(event: Preemption) -> str:
    again = "has not gone on yet" if event.seconds is None else f"went on after {duration(event.seconds)}"
    what = "started over" if event.reason in (BLOCKS_CORRUPT, LENDER_GONE) else f"was preempted for {_who(event.by)}"
    return (
        f"At {clock_time(event.time)} it {what} ({event.reason}): it let go of "
        f"{_count(event.blocks, 'block')}, of which {event.freed:,} became free, and {again}."
    )


def _move(move: Move) -> str:
    why = _REASONS.get(move.reason, move.reason).format(executor=f"the executor {move.executor_id}")
    if move.to is None:
        return f"At {clock_time(move.time)} it left, because {why}: it has not been placed since."
    to = f"{move.to} again, which had come back," if move.to == move.executor_id else move.to
    after = "" if move.seconds is None else f" after {duration(move.seconds)}"
    back = move.next_token_seconds
    token = "no token of it has come since" if back is None else f"its next token came after {duration(back)}"
    return f"At {clock_time(move.time)} it moved, because {why}: it was placed on {to}{after}, and {token}."


def _reset(event: Interruption) -> str:
    back = (
        "no step has come back from it since"
        if event.seconds is None
        else f"its first step after that came back {duration(event.seconds)} later"
    )
    what = " and lost all KV, which had to be computed again" if event.ran else ", while it waited there"
    return f"At {clock_time(event.time)} the executor {event.executor_id} was reset after an error{what}; {back}."


def _decode(told: Explanation) -> Iterator[str]:
    if (phase := told.decode) is not None and phase.others_tokens:
        yield (
            f"While its output was decoded, {_count(phase.steps, 'step')} ran, in which "
            f"{_tokens(phase.others_tokens)} of the prompts of others were computed too: steps that do so take longer."
        )
