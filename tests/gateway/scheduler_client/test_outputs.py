"""Frames of outputs as text, finish reasons, and deltas for the client."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from pagewise_gateway.generation import (
    TOKEN_BYTES,
    AnswerOptions,
    GenerationError,
    NoExecutorError,
    SequenceDelta,
    SlowReaderError,
)
from pagewise_gateway.http.errors import OverloadedError
from pagewise_gateway.http.intake import AnswerMemory, Reservation
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import live_request
from pagewise_gateway.scheduler_client.live_request import LiveRequest
from pagewise_gateway.scheduler_client.stream_table import MOST_STREAMS, StreamTable
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    Outputs,
    Prompt,
    PromptFailed,
    RequestParams,
    Started,
    StreamFinished,
    StreamPromptLogprobs,
    Submit,
    TokenLogprobs,
    pack_int32s,
)
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.gateway.server import TOKENIZER

TEXT = "the fox jumps"
TOKENS = TOKENIZER.encode(TEXT)
END = min(TOKENIZER.eos_token_ids)
MOST_UNREAD = 32_768 * TOKEN_BYTES
"""Instead of the limit that there is, which takes seconds to reach."""


class Table:
    """A stream table with requests of one prompt each by default."""

    def __init__(self) -> None:
        self.metrics = Metrics("m")
        self.table = StreamTable(self.metrics)
        self.ended: list[LiveRequest] = []

    def add(
        self, *, prompts: int = 1, max_tokens: int = 30, held: Reservation | None = None, **fields: Any
    ) -> LiveRequest:
        prompt = Prompt(pack_int32s([1, 2, 3]), max_tokens)
        sampling = fields.pop("sampling", SamplingParams(stop_token_ids=(END,)))
        options = {name: fields.pop(name) for name in AnswerOptions.__slots__ if name in fields}
        request = Submit(0, 0, "r", (prompt,) * prompts, RequestParams(sampling, **fields))
        live = LiveRequest(
            request,
            AnswerOptions(wants_token_ids=True, **options),
            TOKENIZER,
            self.metrics,
            self.table.has_news,
            self._end,
            held,
        )
        assert self.table.add(live)
        return live

    def _end(self, live: LiveRequest) -> None:
        self.ended.append(live)
        self.table.remove(live)

    def take(self, tokens: Sequence[tuple[int, int]] = (), **fields: Any) -> list[int]:
        """Apply a frame with (stream, token) pairs; returns the streams that a stop string has ended."""
        streams = pack_int32s([stream for stream, _ in tokens])
        packed = pack_int32s([token for _, token in tokens])
        return self.table.apply(Outputs(1, streams=streams, tokens=packed, **fields)).stopped

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"pagewise_{name}", {"model_name": "m", **labels}) or 0.0


async def told(live: LiveRequest) -> list[SequenceDelta]:
    deltas = []
    while news := await live.next():
        deltas += news
    return deltas


async def outcome(
    tokens: list[int],
    reason: Literal["stop", "length"],
    stop_token: int = -1,
    *,
    stop: tuple[str, ...] = (),
    beam: BeamParams | None = None,
    **fields: Any,
) -> tuple[str, str | None, str | int | None]:
    """Text, finish and stop reason of an output of which all tokens come in the frame that finishes it."""
    table = Table()
    live = table.add(stop=stop, beam=beam, **fields)
    table.take([(0, token) for token in tokens], finished=(StreamFinished(0, reason, stop_token),))
    deltas = await told(live)
    assert table.ended == [live]
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason


@pytest.mark.parametrize("beam", [None, BeamParams(2)])
async def test_only_the_stop_token_itself_is_hidden(beam: BeamParams | None) -> None:
    assert await outcome([*TOKENS, END], "stop", END, beam=beam) == (TEXT, "stop", None)
    assert await outcome(TOKENS, "length", beam=beam) == (TEXT, "length", None)
    last = TOKENIZER.token_text(TOKENS[-1])
    hidden = TEXT.removesuffix(last)
    assert await outcome(TOKENS, "stop", TOKENS[-1], beam=beam) == (hidden, "stop", TOKENS[-1])
    shown = await outcome(TOKENS, "stop", TOKENS[-1], beam=beam, include_stop_str_in_output=True)
    assert shown == (TEXT, "stop", TOKENS[-1])


async def test_a_stop_string_that_the_last_permitted_token_completes_is_why_it_ended() -> None:
    assert await outcome(TOKENS, "length", stop=("jumps",)) == ("the fox ", "stop", "jumps")
    assert await outcome(TOKENS, "length", stop=("jumpsy",)) == (TEXT, "length", None)


async def test_the_scheduler_is_told_of_a_stop_string_unless_it_has_ended_the_output_itself() -> None:
    table = Table()
    live = table.add(stop=("fox",), n=2)
    both = [(stream, token) for token in TOKENS for stream in (0, 1)]
    assert table.take(both, finished=(StreamFinished(1, "length"),)) == [0]
    deltas = await told(live)
    assert [(delta.index, delta.text, delta.finish_reason, delta.stop_reason) for delta in deltas] == [
        (0, "the ", "stop", "fox"),
        (1, "the ", "stop", "fox"),
    ]
    assert len(deltas[0].token_ids) < len(TOKENS), "tokens behind the stop string are dropped"
    assert deltas[0].token_ids == deltas[1].token_ids
    assert table.take([(0, 70)]) == []
    assert table.value("request_success_total", finished_reason="stop") == 2


async def test_a_stop_token_counts_before_a_stop_string_of_its_text() -> None:
    last = TOKENIZER.token_text(TOKENS[-1])
    ended = await outcome(TOKENS, "stop", TOKENS[-1], stop=(last,), include_stop_str_in_output=True)
    assert ended == (TEXT, "stop", TOKENS[-1])


async def test_deltas_are_merged_until_they_are_read() -> None:
    table = Table()
    live = table.add(n=2)
    for token in TOKENS[:3]:
        table.take([(0, token), (1, token)])
    deltas = await live.next()
    assert [(delta.index, delta.token_ids) for delta in deltas] == [(0, TOKENS[:3]), (1, TOKENS[:3])]
    assert deltas[0].text == TOKENIZER.decode(TOKENS[:3])
    table.take([(1, 70)])
    assert [(delta.index, delta.token_ids) for delta in await live.next()] == [(1, [70])]


async def test_an_answer_that_does_not_stream_comes_whole() -> None:
    table = Table()
    live = table.add(n=2, whole=True)
    news = asyncio.create_task(live.outcome())
    for token in TOKENS:
        table.take([(0, token), (1, token)])
        await asyncio.sleep(0)
    table.take(finished=(StreamFinished(1, "length"),))
    await asyncio.sleep(0)
    assert not news.done()
    table.take(finished=(StreamFinished(0, "length"),))
    assert [(delta.index, delta.text) for delta in await news] == [(0, TEXT), (1, TEXT)]


async def test_a_follower_is_told_at_once_and_whoever_waits_gets_the_rest() -> None:
    table = Table()
    live = table.add(n=2)
    told: list[list[int]] = []
    ready = True

    def follower() -> bool:
        if ready:
            told.append([delta.index for delta in live.take_deltas()])
        return ready

    live.follow(follower)
    waiting = asyncio.create_task(live.next())
    await asyncio.sleep(0)
    table.take([(0, 70), (1, 70), (0, 71)])
    table.take([(1, 71)], finished=(StreamFinished(1, "length"),))
    assert told == [[0, 1], [1]], "once for a frame, when all of it is known"
    ready = False
    table.take([(0, 72)])
    table.take([(0, 73)])
    assert [delta.token_ids for delta in await waiting] == [[72, 73]]
    ready = True
    table.take([(0, 74)], finished=(StreamFinished(0, "length"),))
    assert told == [[0, 1], [1]], "the last news is for whoever waits"
    assert [(delta.token_ids, delta.finish_reason) for delta in await live.next()] == [([74], "length")]
    assert await live.next() == []


async def test_a_follower_that_fails_fails_its_own_request() -> None:
    table = Table()
    live, other = table.add(), table.add()

    def follower() -> bool:
        raise RuntimeError("a bug")

    live.follow(follower)
    table.take([(0, 70), (1, 70)])
    with pytest.raises(RuntimeError, match="a bug"):
        await live.next()
    assert table.ended == [live]
    assert live.unfinished
    assert [delta.token_ids for delta in await other.next()] == [[70]]


async def test_log_probabilities_belong_to_their_tokens() -> None:
    table = Table()
    first, second = table.add(sampling=SamplingParams(logprobs=0)), table.add()
    entries = tuple(TokenLogprobs(index, 70 + index, -1.0, 1) for index in (0, 2))
    table.take([(0, 70), (1, 71), (0, 72), (9, 73)], logprobs=entries)
    (delta,) = await first.next()
    assert delta.logprobs is not None
    assert [list(ids) for ids, _ in delta.logprobs.rows(0, 9)] == [[70], [72]]
    assert (await second.next())[0].logprobs is None
    entries = (TokenLogprobs(1, 5, -1.0, 1), TokenLogprobs(2, 6, -1.0, 1))
    again = (TokenLogprobs(2, 6, -1.0, 1), TokenLogprobs(3, 7, -1.0, 1))
    table.take(prompt_logprobs=(StreamPromptLogprobs(0, entries), StreamPromptLogprobs(0, again)))
    assert [list(ids) for ids, _ in first.prompts[0].logprobs.rows(0, 9)] == [[5], [6], [7]]


async def test_nothing_of_a_prompt_that_was_only_to_be_computed_is_shown() -> None:
    table = Table()
    live = table.add(max_tokens=0)
    table.take([(0, 70)], finished=(StreamFinished(0, "length"),))
    (delta,) = await told(live)
    assert (delta.text, delta.token_ids, delta.finish_reason, live.num_output_tokens) == ("", [], "length", 0)
    assert live.output(0).progress().tokens == b""


async def test_a_prompt_that_fails_takes_its_request_with_it() -> None:
    table = Table()
    live, other = table.add(prompts=2), table.add()
    table.take([(0, TOKENS[0]), (2, TOKENS[0])], failed=(PromptFailed(1, "unavailable", "nobody came"),))
    assert (await live.next())[0].index == 0, "what came before is told first"
    with pytest.raises(NoExecutorError, match="nobody came"):
        await live.next()
    assert live.unfinished
    assert table.value("request_success_total", finished_reason="error") == 2
    table.take([(0, TOKENS[1]), (2, TOKENS[1])], failed=(PromptFailed(0, "internal", "again"),))
    assert (await other.next())[0].token_ids == TOKENS[:2]
    table.take(failed=(PromptFailed(2, "internal", "fire"),))
    with pytest.raises(GenerationError, match="fire"):
        await other.next()


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompts": 2}, {"sampling": SamplingParams(logprobs=3)}])
async def test_a_client_that_leaves_too_much_unread_is_cut_off(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_request, "MOST_UNREAD", MOST_UNREAD)
    table = Table()
    live = table.add(max_tokens=10**6, **fields)
    limit = MOST_UNREAD // live.token_bytes
    table.take([(0, 70)] * (limit - 1000))
    assert table.ended == []
    table.take([(0, 70)] * 2000)
    assert table.ended == [live]
    with pytest.raises(SlowReaderError, match=f"at most {MOST_UNREAD} may wait"):
        await live.next()
    assert table.value("http_slow_readers_total") == 1


async def test_one_that_is_cut_off_by_a_frame_that_also_ends_it_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_request, "MOST_UNREAD", MOST_UNREAD)
    table = Table()
    table.add(max_tokens=10**6, n=2, stop=("fox",))
    stopping = [(0, token) for token in TOKENIZER.encode("the fox")]
    table.take([*stopping, *[(1, 70)] * (MOST_UNREAD // TOKEN_BYTES + 2)], finished=(StreamFinished(1, "length"),))
    assert len(table.ended) == 1
    ended = [table.value("request_success_total", finished_reason=reason) for reason in ("abort", "stop", "length")]
    assert ended == [2, 0, 0]


@pytest.mark.parametrize("fields", [{"whole": True}, {"beam": BeamParams(3)}])
async def test_what_nobody_could_have_read_yet_is_no_reason_to_cut_off(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_request, "MOST_UNREAD", MOST_UNREAD)
    table = Table()
    table.add(max_tokens=10**6, **fields)
    for _ in range(MOST_UNREAD // TOKEN_BYTES // 1000 + 2):
        table.take([(0, 70)] * 1000)
    assert table.ended == []


def answers(total: int, metrics: Metrics) -> tuple[AnswerMemory, Reservation]:
    memory = AnswerMemory(total, metrics)
    return memory, Reservation(memory, "a")


async def test_a_stream_holds_memory_only_for_what_is_not_read() -> None:
    table = Table()
    memory, held = answers(64_000_000, table.metrics)
    live = table.add(max_tokens=10**6, held=held)
    for _ in range(3):
        table.take([(0, 70)] * 2000)
        assert memory.used == 0, "few tokens take none"
        table.take([(0, 70)] * 8000)
        assert 10_000 * TOKEN_BYTES <= memory.used < 14_000 * TOKEN_BYTES
        await live.next()
        waiting = asyncio.create_task(live.next())
        await asyncio.sleep(0)
        assert memory.used == 0, "it has been written when the next is asked for"
        table.take([(0, 70)])
        await waiting


@pytest.mark.parametrize("whole", [False, True])
async def test_an_answer_that_finds_no_memory_ends_its_request(whole: bool) -> None:
    table = Table()
    memory, held = answers(4_000_000, table.metrics)
    live = table.add(max_tokens=10**6, held=held, whole=whole)
    other = table.add(max_tokens=10**6, held=Reservation(memory, "b"), whole=whole)
    for _ in range(100):
        table.take([(0, 70), (1, 70)] * 500)
    assert table.ended == [live, other]
    for request, key in ((live, "a"), (other, "b")):
        with pytest.raises(OverloadedError, match=f"API key {key}: .*--max-answer-memory"):
            await (request.outcome() if whole else request.next())
    assert table.value("gateway_requests_refused_total", reason="key_answer_memory") == 2
    assert memory.used <= 2_000_000


async def test_times() -> None:
    table = Table()
    live = table.add(n=2)
    live.arrival_time -= 1.0
    table.take([(0, 70), (1, 70)], started=(Started(0, 2, 250_000, 500_000),))
    for _ in range(3):
        table.take([(0, 70), (1, 70)])
    table.take(started=(Started(0, 3, 1, 1),))
    assert live.prompts[0].cached_tokens == 2
    assert table.value("time_to_first_token_seconds_count") == 1
    assert 1.0 <= table.value("time_to_first_token_seconds_sum") < 2.0
    assert table.value("inter_token_latency_seconds_count") == 6
    assert 1.2 <= table.value("request_queue_time_seconds_sum") < 2.0
    assert table.value("request_prefill_time_seconds_sum") == 0.5
    assert table.value("prompt_tokens_total") == 3
    assert table.value("e2e_request_latency_seconds_count") == 0
    live.abort()
    live.abort()
    assert table.value("e2e_request_latency_seconds_count") == 1
    assert table.value("request_decode_time_seconds_count") == 1
    assert table.value("request_success_total", finished_reason="abort") == 2


def live_time() -> float:
    return asyncio.get_running_loop().time()


async def test_what_is_chosen_has_no_latency_between_tokens() -> None:
    table = Table()
    table.add(beam=BeamParams(2))
    table.take([(0, token) for token in TOKENS], finished=(StreamFinished(0, "length"),))
    assert table.value("inter_token_latency_seconds_count") == 0
    assert table.value("time_to_first_token_seconds_count") == 1


def test_numbers_are_given_in_order_and_end() -> None:
    table = Table()
    assert [table.add(prompts=2, n=3).stream, table.add(prompts=0).stream, table.add().stream] == [0, 6, 7]
    table.table._next = MOST_STREAMS
    with pytest.raises(AssertionError):
        table.add()
    table.table.clear()
    assert table.add().stream == 0


@pytest.mark.parametrize(
    "frame",
    [
        Outputs(1, streams=b"\0\0\0\0"),
        Outputs(1, streams=b"\0\0\0", tokens=b"\0\0\0"),
        Outputs(1, streams=b"\0\0\0\0", tokens=b"\xff\xff\xff\xff"),
        Outputs(1, logprobs=(TokenLogprobs(0, 1, 0.0, 1),)),
        Outputs(1, streams=b"\0" * 4, tokens=b"\0" * 4, logprobs=(TokenLogprobs(-1, 1, 0.0, 1),)),
        Outputs(1, streams=b"\0" * 4, tokens=b"\0" * 4, logprobs=(TokenLogprobs(0, -1, 0.0, 1),)),
        Outputs(1, streams=b"\0" * 4, tokens=b"\0" * 4, logprobs=(TokenLogprobs(0, 2**40, 0.0, 1),)),
        Outputs(1, streams=b"\0" * 4, tokens=b"\0" * 4, logprobs=(TokenLogprobs(0, 1, 0.0, 1, b"\1\0\0\0"),)),
        Outputs(1, streams=b"\0" * 4, tokens=b"\0" * 4, logprobs=(TokenLogprobs(0, 1, 0.0, 1, b"1", b"1"),)),
        Outputs(1, prompt_logprobs=(StreamPromptLogprobs(0, (TokenLogprobs(1, 1, 0.0, 1, b"\xff" * 4, b"\0" * 4),)),)),
    ],
)
def test_frames_that_no_scheduler_sends_change_nothing(frame: Outputs) -> None:
    table = Table()
    live = table.add()
    with pytest.raises(ProtocolError):
        table.table.apply(frame)
    assert (list(live.output(0).tokens), len(live.prompts[0].logprobs)) == ([], 0)


async def test_a_client_that_is_cut_off_by_the_token_that_completes_a_stop_string_costs_nobody_else_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table()
    tokens = TOKENIZER.encode("the fox jumps")
    live, other = table.add(stop=("jumps",), max_tokens=400), table.add(max_tokens=400)
    live._most_unread = len(tokens) - 2  # so that the last of them is one too many
    table.take([*((0, token) for token in tokens), (1, 70)])
    assert live.ended
    assert [delta.token_ids for delta in await other.next()] == [[70]]


@pytest.mark.parametrize("merged", [True, False])
async def test_a_stop_string_is_why_an_output_ended_however_tokens_are_put_into_frames(merged: bool) -> None:
    """The scheduler does not know of it when it samples a stop token."""
    table = Table()
    live = table.add(stop=("fox",), max_tokens=400, sampling=SamplingParams(stop_token_ids=(END,)))
    tokens = TOKENIZER.encode("the fox")
    ended = (StreamFinished(0, "stop", END),)
    if merged:
        table.take([*((0, token) for token in tokens), (0, END)], finished=ended)
    else:
        table.take([(0, token) for token in tokens])
        table.take([(0, END)], finished=ended)
    deltas = await told(live)
    assert "".join(delta.text for delta in deltas) == "the "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "fox")
