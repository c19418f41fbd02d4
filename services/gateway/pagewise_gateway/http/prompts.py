"""Turns prompts, conversations and banned words into token ids, and finds the segments that a request declares.

A segment has to have the same tokens wherever it stands, so a prompt with segments is tokenized piece by piece: the
text before a segment, the segment, and the text behind it.
"""

import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import structs
from pagewise_shared.protocol import PromptSegments, pack_int32s
from pagewise_shared.segments import ALL_BEFORE, MAX_SEGMENTS, make_segments

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.conversation import (
    check_depth,
    check_messages,
    check_tool_list,
    template_kwargs,
    template_message,
    template_tools,
)
from pagewise_gateway.http.errors import ContextLengthError, InvalidRequestError
from pagewise_gateway.http.params import bad_word_tokens
from pagewise_gateway.http.schema import (
    ALWAYS_TOKENIZED_CHARACTERS,
    CHARACTERS_PER_TOKEN,
    MAX_PROMPTS,
    MAX_TEMPLATE_KWARGS_BYTES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Segments,
    TokenizeRequest,
)
from pagewise_gateway.text.template import RESERVED_NAMES, ChatTemplateError, Dialect
from pagewise_gateway.text.tokenizer import Tokenizer

_NAME = re.compile("(\ue000[0-9a-f]{24}\ue001)")
"""What stands for a marked part while the chat template is rendered."""
SHORT_CHARACTERS = 2_000
"""Texts of up to this length are tokenized on the event loop, because a round trip to a thread takes longer."""
_END_CHARACTERS = 64
"""So many last characters of a prompt tell whether it begins the reasoning of its answer."""
_FEW_PIECES = 32
"""Conversations of so many messages, parts and calls are rendered on the event loop, in turns."""


class Piece(NamedTuple):
    """A part of a prompt's text, which may be a segment, or the root of all segments."""

    text: str
    kind: Literal["", "segment", "root"] = ""


class Encoded(NamedTuple):
    """A prompt: its token ids (int32), and of its segments the first token and the first one behind each.

    ``root``: how many first tokens the segments attend to. ``text``: of a conversation, the end of its text, or all of
    it.
    """

    tokens: "array[int]"
    ranges: list[tuple[int, int]]
    root: int = ALL_BEFORE
    text: str = ""


def check_segments(body: CompletionRequest | ChatRequest, prompts: Sequence[str | list[int]] = ("",)) -> None:
    """Check what a request with segments may not ask for besides. ``prompts``: of a completion; a chat has one text.

    Raises:
        InvalidRequestError: it does.
    """
    marked = num_marked(body.messages) if isinstance(body, ChatRequest) else 0
    if body.segments is None and not marked:
        return
    if marked > MAX_SEGMENTS:
        raise InvalidRequestError(f"{marked} marked parts are too many: at most {MAX_SEGMENTS}", "messages")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("segments and truncate_prompt_tokens cannot be used together", "segments")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "segments: there are no log-probabilities of a prompt (echo) whose segments are not computed", "segments"
        )
    _check_names(body.segments or Segments(), marked, prompts)


def _check_names(asked: Segments, marked: int, prompts: Sequence[str | list[int]]) -> None:
    """Check that segments are named in one way, which suits the prompt, and their root with it."""
    named = {"texts": asked.texts is not None, "ranges": asked.ranges is not None, "marks": marked > 0}
    ways = [way for way, used in named.items() if used]
    if len(ways) != 1:
        raise InvalidRequestError(
            "segments: name them by texts, by ranges, or by marked parts of messages, in one of these ways", "segments"
        )
    kind, root = {"texts": (str, str), "ranges": (list, int), "marks": (str, bool)}[ways[0]]
    if len(prompts) != 1 or not isinstance(prompts[0], kind):
        of = "of token ids" if kind is list else "that is a text"
        raise InvalidRequestError(f"segments.{ways[0]} are of one prompt {of}", "segments")
    if type(asked.root) not in (root, bool, type(None)):
        raise InvalidRequestError("segments.root is a text with texts, and a number of tokens with ranges", "segments")


def mark_parts(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], dict[str, str]]:
    """Put a name into the place of each marked part of some messages, for the chat template to carry it along.

    Returns the messages, and the texts by these names, which no text has: they are drawn at random.
    """
    texts: dict[str, str] = {}
    marked = []
    for message in messages:
        if isinstance(message.content, list) and any(part.segment for part in message.content):
            parts = []
            for part in message.content:
                if part.segment:
                    texts[name := f"\ue000{secrets.token_hex(12)}\ue001"] = part.text
                    part = type(part)("text", name)
                parts.append(part)
            message = structs.replace(message, content=parts)
        marked.append(message)
    return marked, texts


def unmark(rendered: str, texts: dict[str, str]) -> list[Piece]:
    """Cut a rendered conversation at the names that ``mark_parts`` has put in, and put back the texts.

    Raises:
        InvalidRequestError: the chat template leaves a part out, or repeats it.
    """
    between = _NAME.split(rendered)
    if between[1::2] != list(texts):
        raise InvalidRequestError("the chat template leaves out, repeats or reorders a marked part", "messages")
    kinds: tuple[Literal["", "segment"], ...] = ("", "segment")
    return [Piece(texts.get(part, part), kinds[number % 2]) for number, part in enumerate(between)]


def cut(text: str, segments: Segments | None) -> list[Piece]:
    """Cut a prompt at its segments, which are in it in this order, and behind its root, if that is given as a text.

    Raises:
        InvalidRequestError: one of them is not.
    """
    pieces, at = [], 0
    if segments is not None and isinstance(segments.root, str):
        if not text.startswith(segments.root):
            raise InvalidRequestError("segments.root is not how the prompt begins", "segments")
        pieces.append(Piece(segments.root, "root"))
        at = len(segments.root)
    for number, segment in enumerate((segments and segments.texts) or ()):
        found = text.find(segment, at)
        if found < 0:
            raise InvalidRequestError(
                f"segments.texts[{number}] is not in the prompt, behind the one before it", "segments"
            )
        pieces += [Piece(text[at:found]), Piece(segment, "segment")]
        at = found + len(segment)
    return [*pieces, Piece(text[at:])]


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece], add_special_tokens: bool) -> Encoded:
    """Return the token ids of a prompt, and where its segments are in them."""
    tokens, ranges, root = array("i"), [], ALL_BEFORE
    for number, piece in enumerate(pieces):
        start = len(tokens)
        if piece.text or not number:
            tokens.extend(tokenizer.encode(piece.text, add_special_tokens and not number))
        if piece.kind == "segment":
            ranges.append((start, len(tokens)))
        elif piece.kind == "root":
            root = len(tokens)
    return Encoded(tokens, ranges, root)


def prompt_segments(body: GenerationFields, prompt: Encoded) -> PromptSegments | None:
    """Return what is submitted of the segments of a prompt; None if it has none.

    Raises:
        InvalidRequestError: they overlap, are empty or outside the prompt, too many, or nothing follows them.
    """
    if not prompt.ranges:
        return None
    asked, root = body.segments, prompt.root
    boundary = 0 if asked is None else asked.boundary or 0
    if asked is not None and isinstance(asked.root, int) and asked.root is not True:
        root = int(asked.root)  # False: none
    try:
        make_segments(len(prompt.tokens), prompt.ranges, root=root, boundary=boundary)
    except ValueError as error:
        raise InvalidRequestError(f"segments: {error}", "segments") from error
    return PromptSegments(pack_int32s([index for one in prompt.ranges for index in one]), root, boundary)


def num_marked(messages: Sequence[ChatMessage]) -> int:
    """Return how many parts of some messages are marked as segments."""
    parts = (message.content for message in messages if isinstance(message.content, list))
    return sum(bool(part.segment) for content in parts for part in content)


def check_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the request's prompts: one text, one list of token ids, or several of either.

    Raises:
        InvalidRequestError: token ids and prompts are mixed in one list, a prompt is empty, or there are too many.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif (kinds := set(map(type, prompt))) == {int}:
        prompts = [prompt]  # type: ignore[list-item]
    elif int in kinds:
        raise InvalidRequestError("prompt: token ids and prompts are mixed in one list", "prompt")
    else:
        prompts = prompt  # type: ignore[assignment]
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"{len(prompts)} prompts are too many: at most {MAX_PROMPTS}", "prompt")
    return prompts


async def encode_prompt(
    service: Service, prompt: str | list[int], body: CompletionRequest, capacity: Capacity, key: str
) -> Encoded:
    """Return the tokens of one of the request's prompts, and its segments. ``key``: name of the API key.

    Raises:
        InvalidRequestError: the prompt has no tokens, or some outside the vocabulary.
        ContextLengthError: the text is so long that it cannot fit, however it is tokenized.
    """
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            check_text_length(service, prompt, capacity, "prompt")
        else:
            check_tokenizable(prompt, capacity, "prompt")
        encoded = await encode_text(service, cut(prompt, body.segments), body.add_special_tokens is not False, key)
        if not encoded.tokens:
            raise InvalidRequestError("prompt has no tokens", "prompt")
        check_vocabulary(service.tokenizer, encoded.tokens, capacity, "prompt")
        return encoded
    if (largest := max(prompt)) >= capacity.vocab_size:
        raise InvalidRequestError(
            f"prompt: token id {largest} is outside the vocabulary of {capacity.vocab_size}", "prompt"
        )
    if body.truncate_prompt_tokens is None and len(prompt) > capacity.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {capacity.max_model_len} tokens. However, your prompt resulted in "
            f"{len(prompt)} tokens. Please reduce its length.",
            "prompt",
        )
    return Encoded(array("i", prompt), list((body.segments and body.segments.ranges) or ()))


async def encode_text(service: Service, pieces: Sequence[Piece], add_special_tokens: bool, key: str) -> Encoded:
    """Return the tokens of a text, and its segments. A long text is tokenized on another thread.

    ``key``: name of the API key for which this is done.
    """

    def encoded() -> Encoded:
        return encode_pieces(service.tokenizer, pieces, add_special_tokens)

    characters = sum(len(piece.text) for piece in pieces)
    if characters <= SHORT_CHARACTERS:
        return await service.turns.call(key, encoded)
    return await service.tokenizer.off_loop(encoded, key, characters)


async def encode_chat(
    service: Service,
    body: ChatRequest | TokenizeRequest,
    capacity: Capacity | None,
    key: str,
    *,
    whole_text: bool = False,
) -> Encoded:
    """Return the tokens of a conversation, rendered with the model's chat template, and its segments.

    ``key``: name of the API key. A long conversation is rendered and tokenized on another thread. ``whole_text``:
    whether all of its text is wanted as well, and not just its end.

    Raises:
        InvalidRequestError: the conversation cannot be rendered, or has no tokens, or some outside the vocabulary.
        ContextLengthError: as in ``encode_prompt``.
    """
    check_chat(body)
    characters, pieces = _size(body.messages or ())

    def encode() -> Encoded:
        messages, marked = mark_parts(body.messages or ())
        rendered = render_chat(service.tokenizer, body, messages, service.formats.template_kwargs)
        parts = unmark(rendered, marked) if marked else cut(rendered, getattr(body, "segments", None))
        text = "".join([part.text for part in parts])
        if isinstance(body, TokenizeRequest) or body.truncate_prompt_tokens is not None:
            check_tokenizable(text, capacity, "messages")
        elif capacity is not None:
            check_text_length(service, text, capacity, "messages")
        # Chat templates contain the special tokens.
        encoded = encode_pieces(service.tokenizer, parts, bool(body.add_special_tokens))
        if capacity is not None and isinstance(body, ChatRequest):
            check_vocabulary(service.tokenizer, encoded.tokens, capacity, "messages")
        return encoded._replace(text=text if whole_text else text[-_END_CHARACTERS:])

    try:
        simple = not (body.chat_template_kwargs or body.tools)
        if characters <= SHORT_CHARACTERS and pieces <= _FEW_PIECES and simple:
            encoded = await service.turns.call(key, encode)
        else:
            encoded = await service.tokenizer.off_loop(encode, key, characters)
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), "messages") from error
    if service.formats.leaves_out(body.tools):
        service.metrics.requests_without_tools("function").inc()
    if not encoded.tokens:
        raise InvalidRequestError("the messages render to an empty prompt", "messages")
    return encoded


def check_chat(body: ChatRequest | TokenizeRequest) -> None:
    """Check a conversation, and the parameters of the chat template.

    Raises:
        InvalidRequestError: they contradict each other, or are too large.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot be used together", "continue_final_message"
        )
    _check_kwargs(body.chat_template_kwargs)
    check_messages(body.messages or ())
    if isinstance(body, TokenizeRequest):
        check_tool_list(body.tools)


def render_chat(
    tokenizer: Tokenizer,
    body: ChatRequest | TokenizeRequest,
    messages: Sequence[ChatMessage] | None = None,
    default_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the text that the chat template makes of a conversation. ``messages``: in the place of the body's own.
    ``default_kwargs``: variables of the template that the body need not give.

    Raises:
        ChatTemplateError: the template refuses it, or there is none.
    """
    given = (body.messages if messages is None else messages) or ()
    template = tokenizer.chat_template
    calls = any(message.tool_calls for message in given)
    dialect = template.choose(body.tools).dialect if calls else Dialect()
    add_prompt = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return template.render(
        [template_message(message, dialect) for message in given],
        add_generation_prompt=add_prompt,
        continue_final_message=bool(body.continue_final_message),
        tools=template_tools(body.tools),
        template_kwargs=template_kwargs(body, default_kwargs),
    )


async def encode_bad_words(service: Service, words: list[str], key: str) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that ``bad_words`` bans. ``key``: name of the API key.

    Raises:
        InvalidRequestError: they have too many tokens.
    """
    if not words:
        return ()
    characters = 2 * sum(map(len, words))  # each is tokenized twice
    if characters <= SHORT_CHARACTERS:
        return await service.turns.call(key, lambda: bad_word_tokens(words, service.tokenizer))
    return await service.tokenizer.off_loop(lambda: bad_word_tokens(words, service.tokenizer), key, characters)


def check_vocabulary(tokenizer: Tokenizer, tokens: Sequence[int], capacity: Capacity, param: str) -> None:
    """Refuse a text with tokens that the tokenizer has and the model has not, such as those of images.

    Raises:
        InvalidRequestError: the text has such a token.
    """
    if tokenizer.vocab_size > capacity.vocab_size and (largest := max(tokens, default=0)) >= capacity.vocab_size:
        raise InvalidRequestError(
            f"{param}: the text has the token {tokenizer.token(largest)!r}, whose id {largest} is outside the model's "
            f"vocabulary of {capacity.vocab_size}",
            param,
        )


def check_text_length(service: Service, text: str, capacity: Capacity, param: str) -> None:
    """Refuse a text that would not fit even if all its tokens were as long as the longest one of the vocabulary.

    Raises:
        ContextLengthError: the text is that long.
    """
    if len(text) > (capacity.max_model_len + 1) * service.tokenizer.longest_token:
        raise ContextLengthError(
            f"This model's maximum context length is {capacity.max_model_len} tokens; "
            f"a text of {len(text)} characters has more",
            param,
        )


def check_tokenizable(text: str, capacity: Capacity | None, param: str) -> None:
    """Refuse a text that is too long to be tokenized only to be counted or truncated.

    ``capacity``: None if no executor has joined yet.

    Raises:
        ContextLengthError: the text is that long.
    """
    context = capacity.max_model_len if capacity is not None else 0
    most = max(ALWAYS_TOKENIZED_CHARACTERS, CHARACTERS_PER_TOKEN * context)
    if len(text) > most:
        raise ContextLengthError(
            f"{param}: a text of {len(text)} characters is too long to be tokenized here; the limit is {most}: "
            f"{CHARACTERS_PER_TOKEN} for each token of the model's context, but always {ALWAYS_TOKENIZED_CHARACTERS}",
            param,
        )


def _check_kwargs(kwargs: dict[str, Any] | None) -> None:
    check_depth(kwargs, "chat_template_kwargs")
    if reserved := RESERVED_NAMES & (kwargs or {}).keys():
        raise InvalidRequestError(f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
    if kwargs and (size := len(msgspec.json.encode(kwargs))) > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequestError(
            f"chat_template_kwargs takes {size} bytes as JSON, the limit is {MAX_TEMPLATE_KWARGS_BYTES}",
            "chat_template_kwargs",
        )


def _size(messages: Sequence[ChatMessage]) -> tuple[int, int]:
    """How many characters a conversation has, and how many messages, parts and calls."""
    characters, pieces = 0, len(messages)
    for message in messages:
        content = message.content
        if isinstance(content, list):
            pieces += len(content)
            characters += sum(len(part.text) for part in content)
        else:
            characters += len(content or "")
        characters += len(message.reasoning or message.reasoning_content or "")
        for call in message.tool_calls or ():
            pieces += 1
            characters += len(call.function.arguments)
    return characters, pieces
