"""Samples the tokens of a step: logits processors (penalties, bias, masks, grammars), then the token sampler.

On a GPU nothing here waits for the device, unless a row has a grammar or bad words of several tokens, which depend on
the tokens that were sampled last. All rows of a step share a few uploaded arrays, because ``Uploads`` has few buffers.
"""

import numpy as np
import torch
from pagewise_shared.protocol import RowFailure
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.input_batch import Int32s
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.sampling.constraint_tables import ConstraintTables
from pagewise_executor.sampling.logprobs import ComputeLogprobs, LogprobsTensors, gather_logprobs
from pagewise_executor.sampling.penalties import Penalties
from pagewise_executor.sampling.sampled_rows import SampledRows, SamplingState, sampled_rows, sampling_state
from pagewise_executor.sampling.token_sampler import TokenSampler
from pagewise_executor.structured.structured_rows import StructuredRows
from pagewise_executor.uploads import Uploads

_NEGATIVE = float("-inf")
_TOKEN_BYTES = 4


class Sampler:
    """Samples the tokens of all rows of one executor, from logits on ``device``."""

    def __init__(
        self,
        token_sampler: TokenSampler,
        penalties: Penalties,
        tables: ConstraintTables,
        compute: ComputeLogprobs,
        device: torch.device,
        structured: StructuredRows,
    ) -> None:
        self._upload = Uploads(device)
        self._structured = structured
        self._token_sampler, self._penalties, self._compute_logprobs = token_sampler, penalties, compute
        self._tables = tables
        self._states: dict[int, SamplingState] = {}
        self._plain: set[int] = set()
        self._simple: set[int] = set()
        self._grammars: set[int] = set()
        self._sampled: SampledRows | None = None

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Take over a sequence that joins in ``row``; ``tokens`` are all its known tokens."""
        table = self._tables.of(params.constraints) if params.constraints is not None else None
        state = self._states[row] = sampling_state(tokens, num_prompt_tokens, params, table)
        if state.penalised:
            self._penalties.join(row, tokens, num_prompt_tokens, params)
        if params.grammar:
            self._grammars.add(row)
            self._structured.join(row, params.grammar, tokens[num_prompt_tokens:].tobytes(), beam=params.beam)
        self._token_sampler.join(row, params)
        self._sampled = None
        self._classify(row, state)

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row``."""
        state = self._states.pop(row, None)
        if state is not None and state.params.grammar:
            self._grammars.discard(row)
            self._structured.leave(row)
        if state is not None and state.penalised:
            self._penalties.leave(row)
        self._token_sampler.leave(row)
        self._plain.discard(row)
        self._simple.discard(row)
        self._sampled = None

    def check_draftable(self, row: int) -> None:
        """Check that what is sampled in ``row`` depends on the tokens sampled before through the model alone.

        Raises:
            InvalidPlanError: it has penalties, a grammar, bad words of several tokens, or ends that are held back.
        """
        state = self._states[row]
        if state.penalised or state.params.grammar or state.num_held_back or state.history is not None:
            raise InvalidPlanError(f"row {row} has a draft, but what it samples depends on the tokens before")

    def are_simple(self, rows: list[int]) -> bool:
        """Whether these rows need the token sampler only: no logits processors, and no log-probabilities."""
        return self._simple.issuperset(rows)

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor, on_device: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one token for each of ``rows`` from ``logits`` [n, vocab].

        ``positions`` int64 [n]: the positions of the sampled tokens in their sequences. ``on_device`` int32 [n]: the
        rows, if they are there. Returns the tokens int64 [n], and the log-probabilities that were requested for them,
        if any.
        """
        if self._plain.issuperset(rows):
            return logits.argmax(dim=-1), None
        if self._sampled is None or self._sampled.rows != rows:
            self._sampled = None  # its masks give way to the new ones
            self._sampled = sampled_rows(rows, self._states, logits.shape[1], self._upload)
        sampled = self._sampled
        raw = processed = logits.float()
        penalised = [rows[i] for i in sampled.penalised]
        if sampled.needs_processing:
            processed = raw.clone(memory_format=torch.contiguous_format)
            if penalised:
                self._penalties.apply(processed, penalised, sampled.penalised)
            self._process(processed, sampled)
            if sampled.structured:
                self._keep_to_grammars(processed, raw, sampled)
        tokens = self._token_sampler.sample(processed, rows, positions, on_device)
        if penalised:
            self._penalties.count(penalised, tokens.index_select(0, sampled.at_penalised))
        self._update(sampled, tokens)
        if not sampled.reporting:
            return tokens, None
        own, chosen = raw.index_select(0, sampled.at_reporting), tokens.index_select(0, sampled.at_reporting)
        ranked = own
        if sampled.searched:
            ranked = own.clone()
            for number in sampled.searched:  # few: a search is as wide as its beams
                ranked[number] = processed[sampled.reporting[number]]
        return tokens, gather_logprobs(own, chosen, sampled.reporting, sampled.counts, self._compute_logprobs, ranked)

    def take_failures(self) -> list[RowFailure]:
        """Return the rows that cannot go on since the last call, by the indices of their tokens."""
        return self._structured.take_failures() if self._grammars else []

    def _classify(self, row: int, state: SamplingState) -> None:
        """Note how little the sequence in ``row`` needs."""
        simple = state.params.logprobs is None and not state.needs_processing
        (self._simple.add if simple else self._simple.discard)(row)
        (self._plain.add if simple and state.params.temperature == 0 else self._plain.discard)(row)

    def _process(self, logits: torch.Tensor, sampled: SampledRows) -> None:
        """Apply bias and masks, in place, to contiguous logits [n, vocab]."""
        flat = logits.view(-1)
        if sampled.biased is not None and sampled.biases is not None:
            flat.index_add_(0, sampled.biased, sampled.biases)
        if sampled.masks is not None and sampled.limited is None:
            logits.masked_fill_(sampled.masks, _NEGATIVE)
        elif sampled.masks is not None and sampled.limited is not None:
            masked = logits.index_select(0, sampled.limited).masked_fill_(sampled.masks, _NEGATIVE)
            logits.index_copy_(0, sampled.limited, masked)
        if sampled.held_back is not None:
            flat.index_fill_(0, sampled.held_back, _NEGATIVE)
        completing = [
            number * logits.shape[1] + token
            for number, table, history in sampled.followed
            for token in table.completing(history)
        ]
        if completing:
            flat.index_fill_(0, self._upload(np.array(completing, np.int64)), _NEGATIVE)

    def _keep_to_grammars(self, logits: torch.Tensor, raw: torch.Tensor, sampled: SampledRows) -> None:
        """Forbid what the grammars of rows do not allow, in place, in logits [n, vocab]; ``raw`` are those before any
        processing. If that leaves a row no token, its grammar alone decides."""
        at, rows = sampled.at_structured, [sampled.rows[i] for i in sampled.structured]
        forbidden = self._structured.forbidden(rows, sampled.structured)
        own = logits if at is None else logits.index_select(0, at)
        own.masked_fill_(forbidden, _NEGATIVE)
        if sampled.restricted:
            nothing = own.amax(dim=-1, keepdim=True) == _NEGATIVE
            alone = (raw if at is None else raw.index_select(0, at)).masked_fill(forbidden, _NEGATIVE)
            own.copy_(torch.where(nothing, alone, own))
        if at is not None:
            logits.index_copy_(0, at, own)

    def _update(self, sampled: SampledRows, tokens: torch.Tensor) -> None:
        """Note that ``tokens`` were sampled for these rows."""
        if sampled.structured:
            at = sampled.at_structured
            drawn = tokens if at is None else tokens.index_select(0, at)
            self._structured.drawn([sampled.rows[i] for i in sampled.structured], drawn)
        for row in sampled.holding:
            state = self._states[row]
            state.num_held_back -= 1
            if not state.num_held_back:  # it may end from now on
                self._sampled = None
                self._classify(row, state)
        if sampled.followed:
            on_host = tokens.tolist()
            for number, _, history in sampled.followed:
                history += on_host[number].to_bytes(_TOKEN_BYTES, "little")
