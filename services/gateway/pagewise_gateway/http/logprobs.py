"""Log-probabilities in the two shapes of OpenAI's endpoints.

They are made as JSON, a few tokens at a time: there may be millions of them in one answer. Generators yield an empty
piece whenever other tasks may run, and return the JSON.
"""

from array import array
from collections.abc import Generator, Iterable, Sequence

from msgspec import Raw

from pagewise_gateway.generation import PackedLogprobs
from pagewise_gateway.http.responses import ChosenTokenLogprob, TokenLogprob
from pagewise_gateway.http.writing import encode
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON has no minus infinity: a token that cannot be sampled gets this log-probability, as in OpenAI's API."""
_AT_A_TIME = 32
"""Tokens between two pauses: with 20 alternatives each, they take about two milliseconds."""


def chat_logprobs(tokenizer: Tokenizer, entries: PackedLogprobs, as_ids: bool = False) -> Generator[bytes, None, Raw]:
    """Return ``choices[].logprobs`` of a chat completion as JSON (``ChatLogprobs``).

    ``as_ids``: whether tokens are named by their ids.
    """
    parts: list[bytes] = []
    for begin in range(0, len(entries), _AT_A_TIME):
        if begin:
            yield b""
        rows = entries.rows(begin, begin + _AT_A_TIME)
        parts.append(encode([_chosen(tokenizer, ids, values, as_ids) for ids, values in rows])[1:-1])
    return Raw(b'{"content":[%b]}' % b",".join(parts))


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"  # as in vLLM


def _chosen(tokenizer: Tokenizer, ids: "array[int]", values: "array[float]", as_ids: bool) -> ChosenTokenLogprob:
    text, data = _id_name if as_ids else tokenizer.token_text, tokenizer.token_as_bytes
    tops = [TokenLogprob(text(i), max(p, _LOWEST), list(data(i))) for i, p in zip(ids[1:], values[1:], strict=True)]
    return ChosenTokenLogprob(text(ids[0]), max(values[0], _LOWEST), list(data(ids[0])), tops)


LogprobColumns = tuple[bytearray, bytearray, bytearray, bytearray]
"""A part of ``choices[].logprobs`` of a text completion: the JSON of its four lists (tokens, log-probabilities,
alternatives, offsets), without brackets."""
NO_LOGPROBS: LogprobColumns = (bytearray(), bytearray(), bytearray(), bytearray())


def columns_json(first: LogprobColumns, second: LogprobColumns) -> Raw:
    """Return two parts together, as JSON (``responses.CompletionLogprobs``)."""
    lists = [b",".join(filter(None, pair)) for pair in zip(first, second, strict=True)]
    return Raw(b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(lists))


def _extend(columns: LogprobColumns, *values: Sequence[object]) -> None:
    for column, more in zip(columns, values, strict=True):
        if column:
            column += b","
        column += encode(more)[1:-1]


class CompletionLogprobsBuilder:
    """``choices[].logprobs`` of one choice of a text completion, or of the prompt that it echoes, piece by piece.

    ``context``: tokens in front, for the offsets of tokens that hold part of a character. ``offset``: of the text.
    ``as_ids``: whether tokens are named by their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        skip_special_tokens: bool,
        offset: int = 0,
        as_ids: bool = False,
    ) -> None:
        self.offset = offset
        self._tokenizer, self._as_ids = tokenizer, as_ids
        # The texts of tokens that have been named before, without a call.
        self._texts = tokenizer.token_bytes.texts if tokenizer.token_bytes is not None and not as_ids else {}
        self._text = IncrementalDetokenizer(tokenizer, context, skip_special_tokens)

    def add(
        self, entries: PackedLogprobs | None, first_token: int | None = None
    ) -> Generator[bytes, None, LogprobColumns]:
        """Return the part for these tokens. ``first_token``: the first token of an echoed prompt, which has no
        log-probability."""
        texts = self._texts
        part: LogprobColumns = (bytearray(), bytearray(), bytearray(), bytearray())
        if first_token is not None:
            _extend(part, [self._name(first_token)], [None], [None], self._offsets((first_token,)))
        for begin in range(0, len(entries or ()), _AT_A_TIME):
            if begin:
                yield b""
            assert entries is not None
            chosen: list[int] = []
            values: list[float] = []
            tops: list[dict[str, float]] = []
            for ids, logprobs in entries.rows(begin, begin + _AT_A_TIME):
                chosen.append(ids[0])
                values.append(max(logprobs[0], _LOWEST))
                # The token itself comes first, so that no other token with the same text takes its place.
                top: dict[str, float] = {}
                for token_id, logprob in zip(ids, logprobs, strict=True):
                    name = texts.get(token_id)
                    top.setdefault(self._name(token_id) if name is None else name, max(logprob, _LOWEST))
                tops.append(top)
            _extend(part, [self._name(token_id) for token_id in chosen], values, tops, self._offsets(chosen))
        return part

    def _offsets(self, token_ids: Iterable[int]) -> list[int]:
        """Return the position in the text at which each of the next tokens starts."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.offset)
            self.offset += len(self._text.push(token_id))
        return offsets

    def _name(self, token_id: int) -> str:
        """Return the token's text. A part of a character is written as "bytes:\\xe2\\x82", as in OpenAI's API."""
        if self._as_ids:
            return _id_name(token_id)
        data = self._tokenizer.token_as_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
