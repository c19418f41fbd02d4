"""Log-probabilities in the two shapes that OpenAI's endpoints use."""

from collections.abc import Sequence

from pagewise_shared.protocol import TokenLogprobs

from pagewise_gateway.http.responses import (
    ChatLogprobs,
    ChosenTokenLogprob,
    CompletionLogprobs,
    TokenLogprob,
)
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON has no minus infinity: a token that cannot be sampled gets this log-probability, as in OpenAI's API."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """``choices[].logprobs`` of a chat completion."""
    content = []
    for entry in entries:
        tops = [
            TokenLogprob(tokenizer.token_text(i), max(p, _LOWEST), list(tokenizer.token_as_bytes(i)))
            for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        text, data = tokenizer.token_text(entry.token_id), list(tokenizer.token_as_bytes(entry.token_id))
        content.append(ChosenTokenLogprob(text, max(entry.logprob, _LOWEST), data, tops))
    return ChatLogprobs(content)


class CompletionLogprobsBuilder:
    """``choices[].logprobs`` of one choice of a text completion, piece by piece.

    ``context``: tokens in front of the choice's text, for the offsets of tokens that hold part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer, context, skip_special_tokens)
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs], first_token: int | None = None) -> CompletionLogprobs:
        """Return the part for these tokens. ``first_token``: the first token of an echoed prompt, which has none."""
        piece = CompletionLogprobs([], [], [], [])
        if first_token is not None:
            self._append(piece, first_token, None, None)
        for entry in entries:
            logprob = max(entry.logprob, _LOWEST)
            # The token itself comes first, so that no other token with the same text takes its place.
            top = {self._name(entry.token_id): logprob}
            for token_id, alternative in zip(entry.top_ids, entry.top_logprobs, strict=True):
                top.setdefault(self._name(token_id), max(alternative, _LOWEST))
            self._append(piece, entry.token_id, logprob, top)
        return piece

    def _append(
        self, piece: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        piece.tokens.append(self._name(token_id))
        piece.token_logprobs.append(logprob)
        piece.top_logprobs.append(top)
        piece.text_offset.append(self._offset)
        self._offset += len(self._text.push((token_id,)))

    def _name(self, token_id: int) -> str:
        """Return the token's text. A part of a character is written as "bytes:\\xe2\\x82", as in OpenAI's API."""
        data = self._tokenizer.token_as_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
