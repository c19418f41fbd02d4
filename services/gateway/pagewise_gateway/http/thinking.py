"""Turns the thinking budget of a request into tokens: those that begin and end the model's reasoning."""

import logging
from collections.abc import Sequence
from functools import cache

from pagewise_shared.thinking import UNLIMITED, ThinkingBudget

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.errors import InvalidRequestError, UnsupportedParameterError
from pagewise_gateway.http.schema import GenerationFields
from pagewise_gateway.text.output_parsing import OutputFormat, Start
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FIELD = "thinking_token_budget"
_NO_LIMIT = -1
_HARMONY = "<|channel|>analysis<|message|>", "<|end|>"
_OTHER_MESSAGE, _ANSWER = "<|end|><|start|>assistant<|channel|>", "final<|message|>"
_FIRST_TOKENS = 4
"""First tokens of an output within which the model may begin to reason: there may be white space before."""
_LAST_CHARACTERS, _LAST_TOKENS = 64, 8
"""The end of a prompt, which shows whether it begins the reasoning."""


def why_unlimited(output: OutputFormat | None, tokenizer: Tokenizer) -> str:
    """Return why the reasoning of the model cannot be limited here; empty: it can. ``output``: its format."""
    if output is None or not (output.harmony or output.reasoning):
        return "the format of this model's reasoning is not known here, because --reasoning-parser is not set"
    closing = _delimiters(output)[1]
    if len(tokenizer.encode(closing, add_special_tokens=False)) != 1:
        return f"this model has no token for {closing}"
    return ""


def thinking_budget(
    body: GenerationFields,
    output: OutputFormat | None,
    start: Start,
    tokenizer: Tokenizer,
    capacity: Capacity,
    *,
    calls: bool = False,
) -> ThinkingBudget | None:
    """Return the thinking budget of a request; None: it has none, or its prompt has ended the reasoning.

    ``output``, ``start``: the format of the output, and where it begins. ``calls``: whether functions may be called.

    Raises:
        UnsupportedParameterError: the reasoning of this model cannot be limited.
    """
    wanted = body.thinking_token_budget
    if wanted is None or wanted == _NO_LIMIT:
        return None
    reason = why_unlimited(output, tokenizer)
    if reason or output is None:
        raise UnsupportedParameterError(f"{FIELD}: {reason}", FIELD)
    if start == "ended":
        return None
    opening, closing = _delimiters(output)
    forced, opens_within = closing, 0 if start in ("reasoning", "implied") else _FIRST_TOKENS
    if output.harmony:
        forced, opens_within = _OTHER_MESSAGE if calls else _OTHER_MESSAGE + _ANSWER, UNLIMITED
    begin, (end,), tokens = (tokenizer.encode(text, add_special_tokens=False) for text in (opening, closing, forced))
    budget = ThinkingBudget(wanted, end, tuple(tokens), tuple(begin), opens_within)
    if budget.error(capacity.vocab_size) is not None:
        raise UnsupportedParameterError(f"{FIELD}: {closing} is outside the model's vocabulary", FIELD)
    return budget


def drop_impossible_budget(body: GenerationFields, output: OutputFormat | None, tokenizer: Tokenizer) -> None:
    """Drop the thinking budget of a request if this model's reasoning cannot be limited, because some clients always
    send one. ``output``: the format of its answers."""
    if body.thinking_token_budget is not None and (reason := why_unlimited(output, tokenizer)):
        _warn_once(reason)
        body.thinking_token_budget = None


@cache
def _warn_once(reason: str) -> None:
    log.warning("thinking.budget_tokens of requests has no effect: %s", reason)


def start_of_completions(
    prompts: Sequence[str | list[int]], output: OutputFormat | None, tokenizer: Tokenizer
) -> Start:
    """Return where the outputs of these prompts begin. Only what a prompt says counts, because the chat template has
    not written it.

    Raises:
        InvalidRequestError: it is not the same for all.
    """
    if output is None:
        return "main"
    ends = (
        prompt[-_LAST_CHARACTERS:]
        if isinstance(prompt, str)
        else tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
        for prompt in prompts
    )
    starts: set[Start] = {"main" if (start := output.start(end, None)) == "implied" else start for end in ends}
    if len(starts) > 1:
        raise InvalidRequestError(f"{FIELD}: some of the prompts begin the reasoning and others do not", FIELD)
    return starts.pop()


def _delimiters(output: OutputFormat) -> tuple[str, str]:
    """Return the texts that begin and end reasoning."""
    if output.harmony:
        return _HARMONY
    assert output.reasoning is not None
    return output.reasoning.opening, output.reasoning.closing
