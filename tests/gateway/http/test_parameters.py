"""Each parameter of a request in the submission, and the answers to it."""

from array import array
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletionMessageParam
from pagewise_shared.config.sampling_defaults import SamplingDefaults
from pagewise_shared.generation_config import GenerationConfig
from pagewise_shared.protocol import pack_int32s, unpack_int32s
from pagewise_shared.sampling import BeamParams

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, TOKENIZER, Server, serving
from tests.gateway.text.tokenizer_builders import byte_level

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "the quick brown fox "
IDS = TOKENIZER.encode(PROMPT)
TWICE = TOKENIZER.encode(PROMPT * 2)
EURO = TOKENIZER.encode("€")
"""One character in three tokens."""


async def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """A completion's choice."""
    status, answer = await server.post(COMPLETION, {"model": MODEL, "prompt": PROMPT, **fields})
    assert status == 200, answer
    choices: Any = answer["choices"]
    choice: dict[str, Any] = choices[0]
    return choice


async def test_beam_search_arrives() -> None:
    async with serving() as server:
        await complete(server, use_beam_search=True, n=4, length_penalty=0.5, early_stopping="never")
        assert server.scheduler.last.params.beam == BeamParams(4, 0.5, "never")
        await complete(server, use_beam_search=True, n=3, temperature=0)
        assert server.scheduler.last.params.beam == BeamParams(3)
        await complete(server, best_of=2, n=2, stop="x")
        assert (server.scheduler.last.params.beam, server.scheduler.last.params.n) == (None, 2)


async def test_the_wish_to_keep_a_prefix_arrives() -> None:
    async with serving() as server:
        for given, seconds in (("24h", 86400), ("30m", 1800), ("90s", 90), ("in_memory", 0), (None, 0)):
            await complete(server, prompt_cache_retention=given)
            assert server.scheduler.last.params.reuse.retention == seconds


async def test_sampling_parameters_arrive() -> None:
    async with serving() as server:
        await complete(
            server,
            temperature=0.5,
            top_k=7,
            top_p=0.9,
            min_p=0.1,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.1,
            min_tokens=2,
            max_tokens=9,
            n=3,
            stop=["a", "bc"],
            stop_token_ids=[7, 8],
            logit_bias={"5": -100, "6": 1.5},
            allowed_token_ids=[5, 6],
            bad_words=["fox"],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            priority=-3,
            logprobs=4,
        )
        request = server.scheduler.last
        sampling = request.params.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
        assert sampling.seed == 2**64 - 1
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
        assert (sampling.min_tokens, sampling.stop_token_ids) == (2, (0, 7, 8))
        constraints = sampling.constraints
        assert constraints is not None
        assert constraints.allowed == bytes([(1 << 5) | (1 << 6)])
        assert unpack_int32s(constraints.biased).tolist() == [5, 6]
        assert array("f", constraints.biases).tolist() == [-100.0, 1.5]
        assert pack_int32s(TOKENIZER.encode("fox")) in constraints.bad_words
        assert (sampling.logprobs, sampling.prompt_logprobs) == (4, None)
        assert (request.prompts[0].max_tokens, request.params.n, request.params.priority) == (9, 3, -3)


@pytest.mark.parametrize("skip", [None, False])
async def test_special_tokens_are_left_out_unless_they_are_wanted(skip: bool | None) -> None:
    async with serving() as server:
        choice = await complete(server, prompt=[70, 0], max_tokens=4, ignore_eos=True, skip_special_tokens=skip)
        assert choice["text"] == TOKENIZER.decode([70, 0, 70, 0], skip_special_tokens=skip is None)


async def test_defaults() -> None:
    async with serving() as server:
        seeds = set()
        for _ in range(2):
            await complete(server)
            sampling = server.scheduler.last.params.sampling
            seeds.add(sampling.seed)
            assert 0 <= sampling.seed < 2**63
        assert len(seeds) == 2
        assert server.scheduler.last.prompts[0].max_tokens == 16
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs) == (1.0, 0, 1.0, None)
        assert sampling.stop_token_ids == (0,)
        for fields in ({"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0}):
            await complete(server, top_k=-1, ignore_eos=True, **fields)
            sampling = server.scheduler.last.params.sampling
            assert (sampling.temperature, sampling.top_k, sampling.stop_token_ids) == (0.0, 0, ())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(include: bool, stream: bool) -> None:
    async with serving() as server:
        create = server.openai.completions.create
        fields: dict[str, Any] = {"max_tokens": 40, "stop": ["never", "k bro"]}
        extra = {"include_stop_str_in_output": include}
        text = ""
        if stream:
            async for chunk in await create(model=MODEL, prompt=PROMPT, stream=True, extra_body=extra, **fields):
                text += chunk.choices[0].text
                last: Any = chunk.choices[0]
        else:
            last = (await create(model=MODEL, prompt=PROMPT, extra_body=extra, **fields)).choices[0]
            text = last.text
        assert text == ("the quick bro" if include else "the quic")
        assert (last.finish_reason, last.stop_reason) == ("stop", "k bro")


async def test_stop_tokens() -> None:
    async with serving() as server:
        choice = await complete(server, stop_token_ids=[IDS[3]], max_tokens=40)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", IDS[3])
        choice = await complete(server, prompt=[70, 71, 0], max_tokens=40)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_characters_over_several_tokens(stream: bool) -> None:
    assert len(EURO) > 1
    async with serving() as server:
        texts = []
        if stream:
            async for chunk in await server.openai.completions.create(
                model=MODEL, prompt=EURO, max_tokens=2 * len(EURO), stream=True
            ):
                texts.append(chunk.choices[0].text)  # noqa: PERF401
            assert set(texts) <= {"", "€", "€€"}, "no part of a character"
        else:
            texts.append((await complete(server, prompt=EURO, max_tokens=2 * len(EURO)))["text"])
        assert "".join(texts) == "€€"


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_with_echo(stream: bool) -> None:
    """As evaluation harnesses ask for it: the prompt's log-probabilities, at no tokens of output or a few."""
    prompt = [*IDS, *EURO]
    async with serving() as server:
        for max_tokens in (0, 2):
            pieces: list[Any] = []
            create = server.openai.completions.create
            fields: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
            if stream:
                pieces += [c.choices[0] async for c in await create(model=MODEL, stream=True, **fields)]
            else:
                pieces.append((await create(model=MODEL, **fields)).choices[0])
            expected = [*prompt, *prompt[:max_tokens]]
            assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(expected)
            tokens, values, tops, offsets = (
                [entry for piece in pieces for entry in getattr(piece.logprobs, name)]
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            )
            assert len(tokens) == len(values) == len(tops) == len(offsets) == len(expected)
            assert (values[0], tops[0]) == (None, None)
            assert set(values[1:]) == {-0.5}
            assert all(top[token] == -0.5 for token, top in zip(tokens[1:], tops[1:], strict=True))
            assert all(max(top.values()) == -0.25 for top in tops[1:])
            assert tokens[len(IDS)].startswith("bytes:\\xe2")
            text = TOKENIZER.decode(IDS)
            assert all(text[at:].startswith(token) for at, token in zip(offsets, tokens[: len(IDS)], strict=False))
            assert offsets[len(IDS) : len(prompt)] == [len(text)] * len(EURO)
            assert pieces[-1].finish_reason == "length"


async def test_echo_of_text() -> None:
    async with serving() as server:
        choice = await complete(server, echo=True, max_tokens=2)
        assert choice["text"] == PROMPT + TOKENIZER.decode(IDS[:2])
        assert choice["logprobs"] is None
        status, answer = await server.post(COMPLETION, {"prompt": PROMPT, "max_tokens": 0, "echo": True})
        usage: Any = answer["usage"]
        assert (status, usage["completion_tokens"]) == (200, 0)


async def test_logprobs_of_zero_alternatives() -> None:
    async with serving() as server:
        choice = await complete(server, logprobs=0, max_tokens=2)
        first = TOKENIZER.token_text(IDS[0])
        assert choice["logprobs"]["top_logprobs"][0] == {first: -0.5}
        assert choice["logprobs"]["text_offset"] == [0, len(first)]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(stream: bool) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "€"}]
    async with serving() as server:
        create = server.openai.chat.completions.create
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
        contents: list[Any] = []
        if stream:
            async for chunk in await create(model=MODEL, messages=messages, stream=True, **fields):
                logprobs = chunk.choices[0].logprobs
                contents += logprobs.content or [] if logprobs else []
        else:
            logprobs = (await create(model=MODEL, messages=messages, **fields)).choices[0].logprobs
            assert logprobs is not None
            contents += logprobs.content or []
        ids = server.scheduler.last_prompt[: len(contents)]
        assert b"".join(bytes(entry.bytes) for entry in contents) == b"".join(map(TOKENIZER.token_as_bytes, ids))
        for token, entry in zip(ids, contents, strict=True):
            assert entry.token == TOKENIZER.token_text(token)
            assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.5, -9999.0]
        answer = await create(model=MODEL, messages=messages, logprobs=True, max_tokens=1)
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.content is not None
        assert answer.choices[0].logprobs.content[0].top_logprobs == []


async def test_logprobs_may_name_tokens_by_their_ids() -> None:
    names = [f"token_id:{token}" for token in IDS[:2]]
    async with serving() as server:
        fields: dict[str, Any] = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        logprobs = (await complete(server, logprobs=2, echo=True, **fields))["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in [*IDS, *IDS[:2]]]
        assert [next(iter(top)) for top in logprobs["top_logprobs"][-2:]] == names
        assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"][1:] for name in top)
        body = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2, **fields}
        status, answer = await server.post(CHAT, body)
        choices: Any = answer["choices"]
        entries = choices[0]["logprobs"]["content"]
        expected = [f"token_id:{token}" for token in server.scheduler.last_prompt[:2]]
        assert (status, [entry["token"] for entry in entries]) == (200, expected)
        assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])


async def test_return_token_ids() -> None:
    async with serving() as server:
        choice = await complete(server, return_token_ids=True, max_tokens=3)
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (IDS, IDS[:3])
        assert "token_ids" not in await complete(server)
        chunks = [
            chunk.model_dump()
            async for chunk in await server.openai.completions.create(
                model=MODEL, prompt=EURO, max_tokens=3, stream=True, extra_body={"return_token_ids": True}
            )
        ]
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [*EURO, *EURO][:3]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == EURO
        body = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True, "max_tokens": 2}
        _, answer = await server.post(CHAT, body)
        choices: Any = answer["choices"]
        prompt = server.scheduler.last_prompt
        assert (answer["prompt_token_ids"], choices[0]["token_ids"]) == (prompt, prompt[:2])


async def test_truncated_prompts() -> None:
    async with serving() as server:
        await complete(server, truncate_prompt_tokens=3)
        assert server.scheduler.last_prompt == IDS[-3:]
        await complete(server, truncate_prompt_tokens=-1, prompt=PROMPT * 500, max_tokens=12)
        assert len(server.scheduler.last_prompt) == 500
        choice = await complete(server, truncate_prompt_tokens=3, max_tokens=0, echo=True)
        assert choice["text"] == TOKENIZER.decode(IDS[-3:])


DEFAULTS = GenerationConfig(
    SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, max_new_tokens=7)
)


async def test_defaults_of_the_model_are_for_requests_without_values() -> None:
    asked = [{"role": "user", "content": "a"}]
    apis: list[tuple[str, dict[str, Any], int]] = [
        (COMPLETION, {"prompt": PROMPT}, 16),
        (CHAT, {"messages": asked}, 7),
        ("/v1/responses", {"input": "a"}, 7),
        ("/v1/messages", {"messages": asked, "max_tokens": 9}, 9),
    ]
    async with serving(generation=DEFAULTS) as server:
        for path, fields, most in apis:
            status, answer = await server.post(path, fields)
            assert status == 200, answer
            used = server.scheduler.last.params.sampling
            values = (used.temperature, used.top_k, used.top_p, used.min_p, used.repetition_penalty)
            assert values == (0.6, 20, 0.9, 0.05, 1.1)
            assert server.scheduler.last.prompts[0].max_tokens == most
            if path == "/v1/responses":
                assert (answer["temperature"], answer["top_p"]) == (0.6, 0.9)
            status, _ = await server.post(path, {**fields, "temperature": 1, "top_p": 1})
            used = server.scheduler.last.params.sampling
            assert (status, used.temperature, used.top_p, used.top_k) == (200, 1.0, 1.0, 20)
        await complete(server, top_k=-1, min_p=0, repetition_penalty=1, temperature=0, max_tokens=9)
        used = server.scheduler.last.params.sampling
        assert (used.top_k, used.min_p, used.repetition_penalty, used.temperature) == (0, 0.0, 1.0, 0.0)
        await complete(server, use_beam_search=True, n=2)  # beams have no such parameters
        used = server.scheduler.last.params.sampling
        assert (used.temperature, used.top_k, used.repetition_penalty) == (1.0, 0, 1.0)
        _, models = await server.get("/v1/models")
        data: Any = models["data"]
        assert data[0]["sampling_defaults"] == DEFAULTS.defaults.values()


async def test_an_override_limits_all_outputs() -> None:
    async with serving(generation=replace(DEFAULTS, limits_output=True)) as server:
        for fields, most in (({}, 7), ({"max_tokens": 400}, 7), ({"max_tokens": 3}, 3)):
            await complete(server, **fields)
            assert server.scheduler.last.prompts[0].max_tokens == most
        status, answer = await server.post(COMPLETION, {"prompt": PROMPT, "min_tokens": 8, "max_tokens": 20})
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "min_tokens")
        assert "only 7 tokens" in error["message"]


async def test_continuous_usage() -> None:
    async with serving(FakeScheduler(step_seconds=0.05)) as server:
        stream = await server.openai.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=4,
            stream=True,
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
        assert counts == [1, 2, 3, 4, 4]
        del server.scheduler.submits[:]
        stream = await server.openai.completions.create(
            model=MODEL,
            prompt=[PROMPT, PROMPT * 2],
            n=2,
            max_tokens=2,
            stream=True,
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        *chunks, last = [(chunk.choices, chunk.usage) async for chunk in stream]
        ends = {choices[0].index: use for choices, use in chunks if use is not None}  # each chunk counts its own choice
        assert [ends[index].completion_tokens for index in range(4)] == [2] * 4
        assert [ends[index].prompt_tokens for index in range(4)] == [len(IDS)] * 2 + [len(TWICE)] * 2
        assert last[1] is not None
        assert (last[1].completion_tokens, last[1].prompt_tokens) == (8, len(IDS) + len(TWICE))


async def test_usage_in_every_chunk_of_every_stream() -> None:
    async with serving(enable_force_include_usage=True) as server:
        chunks = [
            chunk.usage
            async for chunk in await server.openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=3, stream=True
            )
        ]
    counts = [usage.completion_tokens for usage in chunks if usage is not None]
    assert len(counts) == len(chunks)
    assert (counts[0], counts[-1]) == (0, 3)
    assert counts == sorted(counts)


async def test_chat_prompts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    start = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "<|user|>system: be<|end|><|user|>user: a\nb<|end|><|assistant|>"),
        ({"add_generation_prompt": False}, "<|user|>system: be<|end|><|user|>user: a\nb<|end|>"),
        ({"chat_template_kwargs": {"suffix": "!"}}, "<|user|>system: be<|end|><|user|>user: a\nb<|end|><|assistant|>!"),
        (
            {"continue_final_message": True, "messages": [*start, {"role": "assistant", "content": "So"}]},
            "<|user|>system: be<|end|><|user|>user: a\nb<|end|><|user|>assistant: So",
        ),
    ]
    async with serving() as server:
        for fields, text in cases:
            status, answer = await server.post(CHAT, {"messages": start, "max_tokens": 1, **fields})
            assert status == 200, answer
            ids = server.scheduler.last_prompt
            assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
            tokens = {name: value for name, value in fields.items() if name != "max_tokens"}
            _, tokenized = await server.post("/tokenize", {"messages": start, **tokens})
            assert tokenized["tokens"] == ids


async def test_no_chat_template() -> None:
    tokenizer = byte_level()
    async with serving(FakeScheduler(), tokenizer=tokenizer) as server:
        status, answer = await server.post(CHAT, {"messages": [{"role": "user", "content": "a"}]})
        error: Any = answer["error"]
        assert status == 400
        assert "chat template" in error["message"]


async def test_tokenize_and_detokenize() -> None:
    async with serving() as server:
        status, answer = await server.post("/tokenize", {"model": MODEL, "prompt": PROMPT, "return_token_strs": True})
        assert (status, answer["tokens"], answer["count"], answer["max_model_len"]) == (200, IDS, len(IDS), 512)
        assert answer["token_strs"] == [TOKENIZER.token(token) for token in IDS]
        status, answer = await server.post("/detokenize", {"tokens": [*IDS, 0]})
        assert (status, answer) == (200, {"prompt": PROMPT + "<|end|>"})
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
            ("/detokenize", {"tokens": [400]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {}),
        ):
            status, answer = await server.post(path, body)
            assert status == 400, (path, body)
            assert "error" in answer
