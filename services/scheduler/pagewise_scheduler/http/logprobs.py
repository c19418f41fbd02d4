"""Log-probabilities in the two shapes that OpenAI's endpoints use."""

from pagewise_shared.protocol import TokenLogprobs

from pagewise_scheduler.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON has no minus infinity: a token that cannot be drawn reads as this."""


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs]) -> dict[str, object]:
    """``choices[].logprobs`` of a chat completion."""

    def one(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(tokenizer.token_as_bytes(token_id)),
        }

    return {
        "content": [
            one(entry.token_id, entry.logprob)
            | {"top_logprobs": [one(i, p) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)]}
            for entry in entries
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer, entries: list[TokenLogprobs], first_token: int | None, offset: int
) -> tuple[dict[str, object], int]:
    """``choices[].logprobs`` of a text completion, and the text offset behind it.

    ``first_token``: a prompt's first token, which has no log-probability, if the prompt is echoed.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    if first_token is not None:
        tokens.append(tokenizer.token_text(first_token))
        values.append(None)
        tops.append(None)
    for entry in entries:
        tokens.append(tokenizer.token_text(entry.token_id))
        values.append(max(entry.logprob, _LOWEST))
        top = {tokenizer.token_text(i): max(p, _LOWEST) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)}
        tops.append({tokens[-1]: max(entry.logprob, _LOWEST)} | top)
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset
