"""Turns the thinking budgets of requests into the tokens that begin and end the model's reasoning."""

import logging
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError
from pagewise_shared.thinking import MAX_FORCED, UNLIMITED, ThinkingBudget

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.errors import InvalidRequestError, UnsupportedParameterError
from pagewise_gateway.http.schema import GenerationFields
from pagewise_gateway.text.output_parsing import OutputFormat, Start
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_FIELD = "thinking_token_budget"
_OPTION = "--reasoning-config"
_NO_LIMIT = -1
_HARMONY = "<|channel|>analysis<|message|>", "<|end|>"
_OTHER_MESSAGE, _ANSWER = "<|end|><|start|>assistant<|channel|>", "final<|message|>"
_FIRST_TOKENS = 4
"""Number of first tokens of an output in which reasoning may begin: white space may come before it."""
_LAST_CHARACTERS, _LAST_TOKENS = 64, 8
"""Length of the end of a prompt that shows whether the prompt begins the reasoning."""


class _ReasoningConfig(Struct, forbid_unknown_fields=True):
    """vLLM's ``--reasoning-config``. ``reasoning_start_str``: the delimiter of the parser. ``reasoning_end_str``: the
    text that ends the reasoning by force, which contains the delimiter and may be longer."""

    reasoning_start_str: str | None = None
    reasoning_end_str: str | None = None


class ThinkingBudgets:
    """Makes the thinking budgets of requests to one model.

    ``reasoning``: the format of outputs without calls; None: the format is unknown.
    """

    def __init__(self, config: GatewayConfig, reasoning: OutputFormat | None, tokenizer: Tokenizer) -> None:
        """Raises:
        ConfigError: ``--reasoning-config`` is invalid, or does not fit the format.
        """
        self._reasoning, self._tokenizer = reasoning, tokenizer
        self._warned = False
        self._end_text = self._end(config.reasoning_config) if config.reasoning_config is not None else ""

    def of(
        self,
        body: GenerationFields,
        output: OutputFormat | None,
        start: Start,
        capacity: Capacity,
        *,
        calls: bool = False,
    ) -> ThinkingBudget | None:
        """Return the thinking budget of a request; None: no budget, or the prompt has ended the reasoning.

        ``output``: the format of the output. ``start``: the part of the message with which the output begins.
        ``calls``: whether functions may be called.

        Raises:
            UnsupportedParameterError: the reasoning of this model cannot be limited.
        """
        wanted = body.thinking_token_budget
        if wanted is None or wanted == _NO_LIMIT:
            return None
        reason = self._why_unlimited(output)
        if reason or output is None:
            raise UnsupportedParameterError(f"{_FIELD}: {reason}", _FIELD)
        if start == "ended":
            return None
        opening, closing = _delimiters(output)
        forced, opens_within = self._end_text or closing, 0 if start in ("reasoning", "implied") else _FIRST_TOKENS
        if output.harmony:
            forced, opens_within = _OTHER_MESSAGE if calls else _OTHER_MESSAGE + _ANSWER, UNLIMITED
        (end,) = self._tokens(closing)
        ended_by = () if output.reasoning is None else map(self._tokens, output.reasoning.ended_by)
        others = tuple(tokens[0] for tokens in ended_by if len(tokens) == 1)
        budget = ThinkingBudget(wanted, end, self._tokens(forced), self._tokens(opening), opens_within, others)
        if budget.error(capacity.vocab_size) is not None:
            raise UnsupportedParameterError(f"{_FIELD}: {closing} is outside the model's vocabulary", _FIELD)
        return budget

    def drop_impossible(self, body: GenerationFields) -> None:
        """Drop the budget of a request if this model's reasoning cannot be limited, and warn once: some clients always
        send a budget."""
        if body.thinking_token_budget is None or not (reason := self._why_unlimited(self._reasoning)):
            return
        body.thinking_token_budget = None
        if not self._warned:
            self._warned = True
            log.warning("thinking.budget_tokens of requests has no effect: %s", reason)

    def of_completions(
        self, body: GenerationFields, prompts: Sequence[str | list[int]], capacity: Capacity
    ) -> ThinkingBudget | None:
        """Return the thinking budget of the outputs of these prompts, as ``of`` does. The reasoning is open only if
        the prompt begins it, because no chat template has written the prompt.

        Raises:
            InvalidRequestError: some prompts begin the reasoning and others do not.
            UnsupportedParameterError: the reasoning of this model cannot be limited.
        """
        if body.thinking_token_budget in (None, _NO_LIMIT):
            return None
        starts = {self._start(prompt) for prompt in prompts}
        if len(starts) > 1:
            raise InvalidRequestError(f"{_FIELD}: some of the prompts begin the reasoning and others do not", _FIELD)
        return self.of(body, self._reasoning, starts.pop(), capacity)

    def _start(self, prompt: str | list[int]) -> Start:
        if self._reasoning is None:
            return "main"
        if isinstance(prompt, str):
            end = prompt[-_LAST_CHARACTERS:]
        else:
            end = self._tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
        start = self._reasoning.start(end, None)
        return "main" if start == "implied" else start

    def _why_unlimited(self, output: OutputFormat | None) -> str:
        """Return the reason why outputs of this format cannot have a budget; empty: they can have a budget."""
        if output is None or not (output.harmony or output.reasoning):
            return "the format of this model's reasoning is not known here: --reasoning-parser names it"
        closing = _delimiters(output)[1]
        return "" if len(self._tokens(closing)) == 1 else f"this model has no token for {closing}"

    def _end(self, text: str) -> str:
        """Return the text that ends the reasoning by force; empty: the delimiter of the format."""
        try:
            given = msgspec.json.decode(text, type=_ReasoningConfig)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"{_OPTION} is no JSON object that can be used: {error}") from error
        if self._reasoning is None or self._reasoning.harmony:
            raise ConfigError(f"{_OPTION} requires a --reasoning-parser whose format has delimiters")
        opening, closing = _delimiters(self._reasoning)
        if given.reasoning_start_str not in (None, opening):
            raise ConfigError(f"{_OPTION}: reasoning_start_str of this --reasoning-parser is {opening!r}")
        end = given.reasoning_end_str or ""
        tokens = self._tokens(end)
        if end and not (closing in end and len(tokens) <= MAX_FORCED and set(self._tokens(closing)) <= set(tokens)):
            raise ConfigError(f"{_OPTION}: reasoning_end_str has no {closing!r}, or more than {MAX_FORCED} tokens")
        return end

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _delimiters(output: OutputFormat) -> tuple[str, str]:
    """Return the texts that begin and end reasoning."""
    if output.harmony:
        return _HARMONY
    assert output.reasoning is not None
    return output.reasoning.opening, output.reasoning.closing
