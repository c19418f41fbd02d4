"""Segments that requests declare: their places in the submitted tokens, and refusals."""

from typing import Any

import pytest
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.pieces import mark_parts, unmark
from pagewise_gateway.http.schema import ChatMessage, ContentPart
from pagewise_shared.protocol import PromptSegments, unpack_int32s
from pagewise_shared.segments import ALL_BEFORE

from tests.gateway.server import MODEL, TOKENIZER, Server, serving

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
DOCUMENTS = ["one document, ", "and another. "]


async def submitted(server: Server, path: str, **fields: Any) -> tuple[list[int], PromptSegments]:
    """The tokens of the prompt that was submitted, and its segments."""
    status, answer = await server.post(path, {"model": MODEL, "max_tokens": 2, **fields})
    assert status == 200, answer
    (prompt,) = server.scheduler.last.prompts
    assert prompt.segments is not None
    return unpack_int32s(prompt.tokens).tolist(), prompt.segments


def texts_of(tokens: list[int], segments: PromptSegments) -> list[str]:
    edges = unpack_int32s(segments.ranges).tolist()
    return [TOKENIZER.decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


async def test_segments_are_named_by_their_texts() -> None:
    prompt = f"Read: {DOCUMENTS[0]}--{DOCUMENTS[1]}What?"
    async with serving() as server:
        tokens, segments = await submitted(server, COMPLETION, prompt=prompt, segments={"texts": DOCUMENTS})
        assert texts_of(tokens, segments) == DOCUMENTS
        assert TOKENIZER.decode(tokens) == prompt
        assert (segments.root, segments.boundary) == (ALL_BEFORE, 0)
        again, _ = await submitted(server, COMPLETION, prompt=prompt, segments={"texts": DOCUMENTS, "root": True})
        assert again == tokens


async def test_a_segment_has_the_same_tokens_wherever_it_stands() -> None:
    async with serving() as server:
        found = []
        for before in ("", "a", "the quick "):
            tokens, segments = await submitted(
                server, COMPLETION, prompt=f"{before}{DOCUMENTS[0]}x", segments={"texts": DOCUMENTS[:1]}
            )
            start, stop = unpack_int32s(segments.ranges)
            found.append(tokens[start:stop])
        assert found[0] == found[1] == found[2] == TOKENIZER.encode(DOCUMENTS[0])


async def test_the_root_is_a_text_a_number_of_tokens_or_nothing() -> None:
    async with serving() as server:
        asked = {"texts": DOCUMENTS, "root": "Rules. ", "boundary": 3}
        tokens, segments = await submitted(
            server, COMPLETION, prompt="Rules. Title: " + "".join(DOCUMENTS) + "?", segments=asked
        )
        assert TOKENIZER.decode(tokens[: segments.root]) == "Rules. "
        assert segments.boundary == 3
        ids = list(range(5, 25))
        tokens, segments = await submitted(
            server, COMPLETION, prompt=ids, segments={"ranges": [[4, 9], [9, 12]], "root": 2}
        )
        assert tokens == ids
        assert unpack_int32s(segments.ranges).tolist() == [4, 9, 9, 12]
        assert segments.root == 2
        _, segments = await submitted(server, COMPLETION, prompt=ids, segments={"ranges": [[4, 9]], "root": False})
        assert segments.root == 0


async def test_parts_of_messages_are_marked_as_segments() -> None:
    parts = [{"type": "text", "text": text, "segment": True} for text in DOCUMENTS]
    question = {"type": "text", "text": "What?"}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [*parts, question]}]
    plain = [{"role": "user", "content": [{**part, "segment": None} for part in parts]}]
    async with serving() as server:
        tokens, segments = await submitted(server, CHAT, messages=messages)
        assert texts_of(tokens, segments) == DOCUMENTS
        rendered = TOKENIZER.decode(tokens, skip_special_tokens=False)
        await server.post(CHAT, {"model": MODEL, "max_tokens": 2, "messages": messages[:1] + plain})
        (prompt,) = server.scheduler.last.prompts
        assert prompt.segments is None
        assert "\ue000" not in rendered
        assert "\n".join([*DOCUMENTS, "What?"]) in rendered
        tokens, segments = await submitted(
            server,
            CHAT,
            messages=[{"role": "user", "content": "".join(DOCUMENTS) + "?"}],
            segments={"texts": DOCUMENTS},
        )
        assert texts_of(tokens, segments) == DOCUMENTS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segments": {"texts": ["nowhere"]}}, "segments.texts[0] is not in the prompt, behind the one before it"),
        ({"segments": {"texts": ["b", "a"]}}, "segments.texts[1] is not in the prompt, behind the one before it"),
        ({"segments": {"texts": ["abc"]}}, "segments: the last segment ends the prompt: at least one token has to"),
        ({"segments": {"texts": ["a"], "root": "b"}}, "segments.root is not how the prompt begins"),
        ({"segments": {"texts": ["a"], "root": 1}}, "segments.root is a text with texts, and a number of tokens"),
        ({"segments": {}}, "segments: name them by texts, by ranges, or by marked parts of messages"),
        ({"segments": {"ranges": [[0, 1]]}}, "segments.ranges are of one prompt of token ids"),
        ({"segments": {"texts": ["a"]}, "prompt": ["abc", "abd"]}, "segments.texts are of one prompt that is a text"),
        ({"segments": {"texts": ["a"]}, "truncate_prompt_tokens": 2}, "segments and truncate_prompt_tokens"),
        ({"segments": {"texts": ["a"]}, "echo": True, "logprobs": 1}, "segments: there are no log-probabilities of a"),
        ({"segments": {"ranges": [[0, 2], [1, 3]]}, "prompt": [5, 6, 7, 8]}, "begins before the end of the one before"),
        ({"segments": {"ranges": [[2, 2]]}, "prompt": [5, 6, 7, 8]}, "is empty, or outside the 4 tokens"),
        ({"segments": {"ranges": [[2, 9]]}, "prompt": [5, 6, 7, 8]}, "is empty, or outside the 4 tokens"),
        ({"segments": {"ranges": [[1, 2]], "root": 2}, "prompt": [5, 6, 7, 8]}, "begins at token 1, in the root of 2"),
    ],
)
async def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    async with serving() as server:
        status, answer = await server.post(COMPLETION, {"model": MODEL, "prompt": "abc", **fields})
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "segments")
        assert message in error["message"]


async def test_marked_parts_and_texts_are_not_mixed() -> None:
    marked = [{"role": "user", "content": [{"type": "text", "text": "abc", "segment": True}]}]
    async with serving() as server:
        status, answer = await server.post(CHAT, {"model": MODEL, "messages": marked, "segments": {"texts": ["abc"]}})
        error: Any = answer["error"]
        assert (status, error["message"]) == (
            400,
            "segments: name them by texts, by ranges, or by marked parts of messages, in one of these ways",
        )


async def test_ranges_of_a_text_in_a_list_are_refused_too() -> None:
    async with serving() as server:
        fields: Any = {"model": MODEL, "prompt": ["abcdef"], "segments": {"ranges": [[0, 1]], "root": 7}}
        status, _ = await server.post(COMPLETION, fields)
        assert status == 400


async def test_a_marked_text_is_not_tokenized_only_to_be_refused() -> None:
    """Its length is that of the name in its place when the length of the conversation is checked."""
    async with serving() as server:
        parts = [{"type": "text", "text": "x y " * 60_000, "segment": True}, {"type": "text", "text": "q"}]
        status, answer = await server.post(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": parts}]})
        error: Any = answer["error"]
        assert status == 400
        assert "characters has more" in error["message"]


def test_a_conversation_of_many_marked_parts_is_cut_in_one_pass() -> None:
    messages = [ChatMessage("user", [ContentPart("text", "a", True) for _ in range(512)]) for _ in range(2)]
    marked, texts = mark_parts(messages)
    rendered = "".join(part.text for message in marked for part in message.content if not isinstance(part, str))
    pieces = unmark(rendered + 1000 * "x", texts)
    assert "".join(piece.text for piece in pieces) == 1024 * "a" + 1000 * "x"
    assert sum(piece.kind == "segment" for piece in pieces) == 1024
    with pytest.raises(InvalidRequestError, match="leaves out, repeats or reorders"):
        unmark(rendered[40:], texts)
