"""Every shape of answer, read by OpenAI's own client."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, TOKENIZER, serving

PROMPT = "the quick brown fox "
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Grüße, 世界"}]
CHAT_TEXT = TOKENIZER.render_chat([{"role": "user", "content": "Grüße, 世界"}])
CHAT_IDS = TOKENIZER.encode(CHAT_TEXT, add_special_tokens=False)
CHAT_REPLY = TOKENIZER.decode(CHAT_IDS)
"""The fake's reply if it may repeat the whole prompt (special tokens left out)."""


async def test_completion() -> None:
    async with serving() as server:
        ids = TOKENIZER.encode(PROMPT)
        answer = await server.openai.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=len(ids), temperature=0, seed=1
        )
        assert answer.id.startswith("cmpl-")
        assert (answer.object, answer.model) == ("text_completion", MODEL)
        (choice,) = answer.choices
        assert (choice.index, choice.text, choice.finish_reason) == (0, PROMPT, "length")
        assert choice.logprobs is None
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), len(ids), 2 * len(ids))
        assert usage.prompt_tokens_details.cached_tokens == 1


async def test_completion_stream() -> None:
    async with serving() as server:
        stream = await server.openai.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=40, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert all(chunk.object == "text_completion" and chunk.usage is None for chunk in parts)
    ids = TOKENIZER.encode(PROMPT)
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        expected = [ids[(k + index) % len(ids)] for k in range(40)]
        assert "".join(choice.text for choice in choices) == TOKENIZER.decode(expected)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(ids), 80)


async def test_chat() -> None:
    async with serving() as server:
        answer = await server.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=len(CHAT_IDS), extra_body={"ignore_eos": True}
        )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", CHAT_REPLY, "length")
    assert choice.logprobs is None
    assert choice.message.tool_calls is None


async def test_chat_stream() -> None:
    async with serving() as server:
        stream = await server.openai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=len(CHAT_IDS),
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *parts, last = [chunk async for chunk in stream]
    assert all(chunk.object == "chat.completion.chunk" for chunk in [*parts, last])
    first, second, *_ = [[c.choices[0] for c in parts if c.choices[0].index == index] for index in (0, 1)]
    for choices in (first, second):
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in choices[1:])
        assert (choices[-1].finish_reason, choices[-1].delta.content) == ("length", None)
        assert all(choice.finish_reason is None for choice in choices[:-1])
    assert "".join(choice.delta.content or "" for choice in first) == CHAT_REPLY
    assert "\ufffd" not in CHAT_REPLY
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2 * len(CHAT_IDS)


async def test_chat_ends_at_the_end_of_sequence() -> None:
    async with serving() as server:
        answer = await server.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == "user: Grüße, 世界"
        assert server.scheduler.last.prompts[0].max_tokens == 512 - len(CHAT_IDS)
        assert server.scheduler.last.params.sampling.stop_token_ids == (0,)


async def test_stream_helper_of_the_client() -> None:
    async with serving() as server:
        async with server.openai.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
            final = await stream.get_final_completion()
        assert text == final.choices[0].message.content == "user: Grüße, 世界"


async def test_raw_stream_ends_with_done() -> None:
    async with serving() as server:
        body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 3}
        async with server.http.post(server.url + "/v1/completions", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = await response.text()
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: {") for event in events[:-2])
        assert '"usage"' not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_many_prompts_are_indexed_prompt_by_prompt(stream: bool) -> None:
    prompts = ["the fox", "lazy dog", "0123"]
    async with serving(FakeScheduler(step_seconds=0.001)) as server:
        texts: dict[int, str] = {}
        if stream:
            async for chunk in await server.openai.completions.create(
                model=MODEL, prompt=prompts, n=2, max_tokens=5, stream=True
            ):
                choice = chunk.choices[0]
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        else:
            answer = await server.openai.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=5)
            texts = {choice.index: choice.text for choice in answer.choices}
            assert list(texts) == sorted(texts)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 30
            assert answer.usage.prompt_tokens == sum(len(TOKENIZER.encode(prompt)) for prompt in prompts)
    for index in range(6):
        ids = TOKENIZER.encode(prompts[index // 2])
        expected = [ids[(k + index % 2) % len(ids)] for k in range(5)]
        assert texts[index] == TOKENIZER.decode(expected)


async def test_token_ids_as_prompts() -> None:
    async with serving() as server:
        answer = await server.openai.completions.create(model=MODEL, prompt=[70, 71, 72], max_tokens=3)
        assert answer.choices[0].text == TOKENIZER.decode([70, 71, 72])
        many = await server.openai.completions.create(model=MODEL, prompt=[[70, 71], [72]], max_tokens=2)
        assert [choice.text for choice in many.choices] == [TOKENIZER.decode([70, 71]), TOKENIZER.decode([72, 72])]


async def test_errors_raise_what_the_client_expects() -> None:
    scheduler = FakeScheduler()
    async with serving(scheduler) as server:
        create = server.openai.completions.create
        with pytest.raises(openai.NotFoundError) as not_found:
            await create(model="other", prompt="a")
        assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, prompt="a", n=99)
        assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
        scheduler.refuse = ("overloaded", "too much", 7)
        with pytest.raises(openai.RateLimitError) as limited:
            await create(model=MODEL, prompt="a")
        assert limited.value.response.headers["Retry-After"] == "7"
        scheduler.refuse = ("unavailable", "nobody", 0)
        with pytest.raises(openai.InternalServerError) as unavailable:
            await create(model=MODEL, prompt="a")
        assert unavailable.value.status_code == 503
        scheduler.refuse = ("never_fits", "too long", 0)
        with pytest.raises(openai.BadRequestError) as never:
            await create(model=MODEL, prompt="a")
        assert never.value.code == "context_length_exceeded"


async def test_failure_in_a_stream_is_an_event() -> None:
    async with serving(FakeScheduler(fail_after=3, step_seconds=0.02)) as server:
        stream = await server.openai.completions.create(model=MODEL, prompt=PROMPT, stream=True)
        received = []

        async def read() -> None:
            async for chunk in stream:
                received.append(chunk)  # noqa: PERF401 - chunks before the error count

        with pytest.raises(openai.APIError, match="caught fire"):
            await read()
        assert len(received) == 3


async def test_models() -> None:
    async with serving() as server:
        models = await server.openai.models.list()
        assert [(model.id, model.object) for model in models.data] == [(MODEL, "model")]
        assert (await server.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await server.openai.models.retrieve("other/model")
