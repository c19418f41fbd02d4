"""Turns prompts, conversations and banned words into token ids, and finds the segments that a request declares."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from pagewise_shared.protocol import PromptSegments, pack_int32s
from pagewise_shared.sampling import MAX_BAD_TOKENS
from pagewise_shared.segments import ALL_BEFORE, make_segments

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.conversation import check_chat, render_chat
from pagewise_gateway.http.errors import ContextLengthError, InvalidRequestError
from pagewise_gateway.http.pieces import Piece, cut_at_segments, mark_parts, unmark
from pagewise_gateway.http.schema import (
    ALWAYS_TOKENIZED_CHARACTERS,
    CHARACTERS_PER_TOKEN,
    MAX_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    TokenizeRequest,
)
from pagewise_gateway.text.template import ChatTemplateError
from pagewise_gateway.text.tokenizer import Tokenizer

SHORT_CHARACTERS = 2_000
"""Texts of up to this length are tokenized on the event loop, because a round trip to a thread takes longer."""
_END_CHARACTERS = 64
"""The last characters of a prompt, which show whether it begins the reasoning of its answer."""
_FEW_PIECES = 32
"""Conversations of up to so many messages, parts and calls are rendered on the event loop, in turns."""


class Encoded(NamedTuple):
    """A tokenized prompt.

    Fields:
        tokens: its token ids (int32). ranges: of each segment, its first token and the first token behind it.
        root: the number of first tokens that the segments attend to.
        text: of a conversation, the end of its text, or all of it.
        places: of a conversation, if they have an effect: see ``Prompt.places``.
    """

    tokens: "array[int]"
    ranges: list[tuple[int, int]]
    root: int = ALL_BEFORE
    text: str = ""
    places: Sequence[int] = ()


def _encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece], add_special_tokens: bool) -> Encoded:
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
    """Return the segments of a prompt for the scheduler; None if it has none.

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
        InvalidRequestError: the prompt has no tokens, or tokens outside the vocabulary.
        ContextLengthError: the prompt is so long that it cannot fit, however it is tokenized.
    """
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            _check_text_length(service, prompt, capacity, "prompt")
        else:
            check_tokenizable(prompt, capacity, "prompt")
        encoded = await encode_text(
            service, cut_at_segments(prompt, body.segments), body.add_special_tokens is not False, key
        )
        if not encoded.tokens:
            raise InvalidRequestError("prompt has no tokens", "prompt")
        _check_vocabulary(service.tokenizer, encoded.tokens, capacity, "prompt")
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
    """Return the tokens of a text, and its segments. A long text is tokenized on another thread."""

    def encoded() -> Encoded:
        return _encode_pieces(service.tokenizer, pieces, add_special_tokens)

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
    whether ``Encoded.text`` is all of its text, and not only the end.

    Raises:
        InvalidRequestError: the conversation cannot be rendered, or has no tokens, or tokens outside the vocabulary.
        ContextLengthError: as in ``encode_prompt``.
    """
    check_chat(body)
    characters, pieces = _size(body.messages or ())
    declares = capacity is not None and capacity.snapshots and getattr(body, "truncate_prompt_tokens", None) is None

    def encode() -> Encoded:
        messages, marked = mark_parts(body.messages or ())
        rendered = render_chat(service.tokenizer, body, messages, service.formats.template_kwargs)
        parts = unmark(rendered, marked) if marked else cut_at_segments(rendered, getattr(body, "segments", None))
        text = "".join([part.text for part in parts])
        if isinstance(body, TokenizeRequest) or body.truncate_prompt_tokens is not None:
            check_tokenizable(text, capacity, "messages")
        elif capacity is not None:
            _check_text_length(service, text, capacity, "messages")
        # Chat templates contain the special tokens.
        if declares and len(parts) == 1 and isinstance(body, ChatRequest):
            tokens, places = service.places.encode(body, text)
            encoded = Encoded(array("i", tokens), [], places=places)
        else:
            encoded = _encode_pieces(service.tokenizer, parts, bool(body.add_special_tokens))
        if capacity is not None and isinstance(body, ChatRequest):
            _check_vocabulary(service.tokenizer, encoded.tokens, capacity, "messages")
        return encoded._replace(text=text if whole_text else text[-_END_CHARACTERS:])

    try:
        simple = not (body.chat_template_kwargs or body.tools)
        if characters <= SHORT_CHARACTERS and pieces <= _FEW_PIECES and simple:
            encoded = await service.turns.call(key, encode)
        else:
            encoded = await service.tokenizer.off_loop(encode, key, characters)
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), "messages") from error
    if service.formats.omits(body.tools):
        service.metrics.requests_without_tools("function").inc()
    if not encoded.tokens:
        raise InvalidRequestError("the messages render to an empty prompt", "messages")
    return encoded


def _size(messages: Sequence[ChatMessage]) -> tuple[int, int]:
    """Return the number of characters of a conversation, and the number of messages, parts and calls."""
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


async def encode_bad_words(service: Service, words: list[str], key: str) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that ``bad_words`` bans. ``key``: name of the API key.

    Raises:
        InvalidRequestError: they have too many tokens.
    """
    if not words:
        return ()
    encode = partial(_bad_word_tokens, words, service.tokenizer)
    characters = 2 * sum(map(len, words))  # each is tokenized twice
    if characters <= SHORT_CHARACTERS:
        return await service.turns.call(key, encode)
    return await service.tokenizer.off_loop(encode, key, characters)  # it may take 0.2 s


def _bad_word_tokens(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to ban: of each word as it is, and as it is tokenized after a space.

    As in vLLM, the second form counts only if it has as many tokens and another first token. Otherwise it would ban the
    space itself.
    """
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        num_tokens += len(plain) + len(spaced)
        if num_tokens > MAX_BAD_TOKENS:
            raise InvalidRequestError(
                f"bad_words: with and without a space before each, they have more than {MAX_BAD_TOKENS} tokens",
                "bad_words",
            )
        if plain:
            found[plain] = None
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found[spaced] = None
    return tuple(found)


def _check_vocabulary(tokenizer: Tokenizer, tokens: Sequence[int], capacity: Capacity, param: str) -> None:
    """Refuse a text with tokens that the tokenizer has and the model does not have, such as image tokens."""
    if tokenizer.vocab_size > capacity.vocab_size and (largest := max(tokens, default=0)) >= capacity.vocab_size:
        raise InvalidRequestError(
            f"{param}: the text has the token {tokenizer.token(largest)!r}, whose id {largest} is outside the model's "
            f"vocabulary of {capacity.vocab_size}",
            param,
        )


def _check_text_length(service: Service, text: str, capacity: Capacity, param: str) -> None:
    """Refuse a text that would not fit even if all its tokens were as long as the longest token of the vocabulary."""
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
