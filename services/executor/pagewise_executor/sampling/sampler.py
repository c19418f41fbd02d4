"""Samples the tokens of a step: logits processors (penalties, bias, masks, grammars), then the token sampler.

On a GPU nothing here waits for the device, unless a row has a grammar or bad words of several tokens, which depend on
the tokens that were sampled last. All rows of a step share a few uploaded arrays, because ``Uploads`` has few buffers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from pagewise_shared.protocol import RowFailure
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.sampling.constraint_tables import NO_CONSTRAINTS, ConstraintTable, ConstraintTables
from pagewise_executor.sampling.logprobs import ComputeLogprobs, LogprobsTensors, gather_logprobs
from pagewise_executor.sampling.penalties import Penalties
from pagewise_executor.sampling.token_sampler import TokenSampler
from pagewise_executor.step_work import Int32s, Int64s
from pagewise_executor.structured.structured_rows import NO_DRAFTS, Drafts, StructuredRows
from pagewise_executor.uploads import Uploads

_NEGATIVE = float("-inf")
_TOKEN_BYTES = 4
_NO_TOKENS: Int64s = np.zeros(0, np.int64)
_NOT_FORCED: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class SamplingState:
    """The sampler's state of one sequence.

    Fields:
        penalised: whether any penalty is in effect.
        num_held_back: for how many more tokens the sequence must not end. held_back: int64 [n], the tokens that would
            end it, empty if it may end from the beginning.
        table: of its token constraints.
        history: all its tokens (int32 bytes); kept only if it has bad words of several tokens.
    """

    params: SamplingParams
    penalised: bool
    num_held_back: int
    held_back: Int64s
    table: ConstraintTable
    history: bytearray

    @property
    def needs_processing(self) -> bool:
        """Whether logits processors change the logits before the token sampler sees them."""
        return self.penalised or self.forbids or bool(self.params.grammar)

    @property
    def forbids(self) -> bool:
        """Whether constraints beside its grammar may forbid tokens."""
        return self.table is not NO_CONSTRAINTS or self.num_held_back > 0


def sampling_state(
    tokens: Int32s, num_prompt_tokens: int, params: SamplingParams, table: ConstraintTable
) -> SamplingState:
    """Return the state of a sequence with these known tokens, before the next one is sampled."""
    num_held_back = max(0, params.min_tokens - (len(tokens) - num_prompt_tokens)) if params.stop_token_ids else 0
    return SamplingState(
        params,
        penalised=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0),
        num_held_back=num_held_back,
        held_back=np.array(params.stop_token_ids, np.int64) if num_held_back else _NO_TOKENS,
        table=table,
        history=bytearray(tokens.tobytes() if table.bad_words else b""),
    )


class Selected(NamedTuple):
    """Some rows of a step: their ``indices`` in the list of rows, also int64 [k] ``on_device``. ``all``: they are all
    rows, so that nothing is copied."""

    indices: list[int]
    on_device: torch.Tensor
    all: bool

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the entries of these rows [k, ...] of values [n, ...]."""
        return values if self.all else values.index_select(0, self.on_device)

    def put(self, values: torch.Tensor, part: torch.Tensor) -> None:
        """Write ``part``, the result of ``of`` after changes in place, back into the entries of these rows."""
        if not self.all:
            values.index_copy_(0, self.on_device, part)


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The inputs of sampling for the ``rows`` of a step, in order, kept while the same sequences are sampled: many rows
    with long lists of tokens take Python several milliseconds. Flat indices are into logits [n, vocab] as one array.

    Fields:
        needs_processing: whether any logits processor changes any logits.
        penalised: the rows with penalties.
        reporting: the rows that report log-probabilities; counts: how many alternatives each of them reports.
        structured: the rows with grammars. restricted: whether other constraints forbid tokens in one of them.
        searched: indices into ``reporting`` of hypotheses of beam searches with grammars.
        biased, biases: flat indices of logits, and their biases.
        limited: the rows with tokens that may never be sampled. masks: bool [k, vocab] of these tokens; None: none.
        held_back: flat indices of the tokens that would end a sequence too early. holding: indices of their rows.
        followed: index and state of each row with bad words of several tokens.
    """

    rows: list[int]
    needs_processing: bool
    penalised: Selected
    reporting: Selected
    counts: list[int | None]
    structured: Selected
    restricted: bool
    searched: list[int]
    biased: torch.Tensor
    biases: torch.Tensor
    limited: Selected
    masks: torch.Tensor | None
    held_back: torch.Tensor
    holding: list[int]
    followed: list[tuple[int, SamplingState]]

    def numbers(self, selected: Selected) -> list[int]:
        """Return the numbers of some of the rows."""
        return [self.rows[index] for index in selected.indices]

    def constrain(self, logits: torch.Tensor, upload: Uploads) -> None:
        """Apply bias and masks, in place, to contiguous logits [n, vocab]."""
        flat = logits.view(-1)
        if len(self.biased):
            flat.index_add_(0, self.biased, self.biases)
        if self.masks is not None:
            self.limited.put(logits, self.limited.of(logits).masked_fill_(self.masks, _NEGATIVE))
        if len(self.held_back):
            flat.index_fill_(0, self.held_back, _NEGATIVE)
        completing = [
            number * logits.shape[1] + token
            for number, state in self.followed
            for token in state.table.completing(state.history)
        ]
        if completing:
            flat.index_fill_(0, upload(np.array(completing, np.int64)), _NEGATIVE)


def sampled_rows(rows: list[int], states: Mapping[int, SamplingState], vocab_size: int, upload: Uploads) -> SampledRows:
    """Collect the inputs of sampling for these rows."""
    found = [states[row] for row in rows]

    def where(test: Callable[[SamplingState], object]) -> list[int]:
        return [index for index, state in enumerate(found) if test(state)]

    def flat(indices: list[int], tokens_of: Callable[[SamplingState], Int64s]) -> Int64s:
        return np.concatenate([_NO_TOKENS, *(tokens_of(found[index]) + index * vocab_size for index in indices)])

    lists = (
        where(lambda one: one.penalised),
        where(lambda one: one.params.logprobs is not None),
        where(lambda one: one.params.grammar),
        where(lambda one: one.table.forbidden is not None),
    )
    with_bias, holding = where(lambda one: len(one.table.biased)), where(lambda one: one.num_held_back)
    forbidden = [found[index].table.forbidden for index in lists[3]]
    # Rows of one request share a mask, so there are seldom many different ones.
    number_of = {mask: number for number, mask in enumerate(dict.fromkeys(forbidden))}
    *selected, at_masks, held_back, biased, biases = upload.together(
        *(np.array(indices, np.int64) for indices in lists),
        np.array([number_of[mask] for mask in forbidden], np.int64),
        flat(holding, lambda one: one.held_back),
        flat(with_bias, lambda one: one.table.biased),
        np.concatenate([NO_CONSTRAINTS.biases, *(found[index].table.biases for index in with_bias)]),
    )
    penalised, reporting, structured, limited = (
        Selected(indices, there, len(indices) == len(rows)) for indices, there in zip(lists, selected, strict=True)
    )
    reported = [found[index].params for index in reporting.indices]
    return SampledRows(
        rows=rows,
        needs_processing=any(state.needs_processing for state in found),
        penalised=penalised,
        reporting=reporting,
        counts=[params.logprobs for params in reported],
        structured=structured,
        restricted=any(found[index].forbids for index in structured.indices),
        searched=[number for number, params in enumerate(reported) if params.beam and params.grammar],
        biased=biased,
        biases=biases,
        limited=limited,
        masks=torch.stack(list(number_of)).index_select(0, at_masks) if forbidden else None,  # type: ignore[arg-type]
        held_back=held_back,
        holding=holding,
        followed=[(index, found[index]) for index in where(lambda one: one.table.bad_words)],
    )


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
        table = NO_CONSTRAINTS if params.constraints is None else self._tables.of(params.constraints)
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
        """Check that sampling in ``row`` depends on the tokens before through the model and a grammar alone.

        Raises:
            InvalidPlanError: the row has penalties, bad words of several tokens or ``min_tokens``, or is of a beam
                search.
        """
        state = self._states[row]
        if state.penalised or state.params.beam or state.num_held_back or state.table.bad_words:
            raise InvalidPlanError(f"row {row} has a draft, but its sampling depends on the tokens before")

    def are_simple(self, rows: list[int]) -> bool:
        """Return whether these rows need only the token sampler: no logits processors, and no log-probabilities."""
        return self._simple.issuperset(rows)

    def sample(
        self,
        logits: torch.Tensor,
        rows: list[int],
        positions: torch.Tensor,
        on_device: torch.Tensor | None = None,
        forced: Mapping[int, int] = _NOT_FORCED,
        drafts: Drafts = NO_DRAFTS,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one token for each of ``rows`` from ``logits`` [n, vocab].

        ``positions`` int64 [n]: the positions of the sampled tokens in their sequences. ``on_device`` int32 [n]: the
        rows on the device; None: they are not there yet. ``forced``: by index in ``rows``, the token that is sampled
        unless a grammar forbids it. ``drafts``: a row with a draft is in ``rows`` once for each of its tokens, and once
        more. Returns the tokens int64 [n], and the requested log-probabilities; None: no row requests any.
        """
        if not forced and self._plain.issuperset(rows):
            return logits.argmax(dim=-1), None
        if self._sampled is None or self._sampled.rows != rows:
            self._sampled = None  # its masks give way to the new ones
            self._sampled = sampled_rows(rows, self._states, logits.shape[1], self._upload)
        sampled = self._sampled
        raw = processed = logits.float()
        if sampled.needs_processing or forced:
            processed = self._process(raw, sampled, forced, drafts)
        tokens = self._token_sampler.sample(processed, rows, positions, on_device)
        self._update(sampled, tokens, drafts)
        reporting = sampled.reporting
        if not reporting.indices:
            return tokens, None
        ranked = own = reporting.of(raw)
        if sampled.searched:
            ranked = own.clone()
            for number in sampled.searched:  # few: a search is as wide as its beams
                ranked[number] = processed[reporting.indices[number]]
        counts, compute = sampled.counts, self._compute_logprobs
        return tokens, gather_logprobs(own, reporting.of(tokens), reporting.indices, counts, compute, ranked)

    def draft(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor, on_device: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sample tokens int64 [n] that may be sampled at ``positions`` later on, with the rows' bias and masks.

        Parameters are as in ``sample``. Grammars go ahead with these tokens, until ``end_drafts``.
        """
        if self._plain.issuperset(rows):
            return logits.argmax(dim=-1)
        raw = logits.float()
        if self._simple.issuperset(rows):
            return self._token_sampler.sample(raw, rows, positions, on_device)
        processed = raw.clone(memory_format=torch.contiguous_format)
        sampled = sampled_rows(rows, self._states, logits.shape[1], self._upload)
        sampled.constrain(processed, self._upload)
        structured = sampled.structured
        if structured.indices:
            forbidden = self._structured.forbidden_ahead(sampled.numbers(structured))
            _keep_to_grammars(processed, raw, forbidden, structured, restricted=sampled.restricted)
        tokens = self._token_sampler.sample(processed, rows, positions, on_device)
        if structured.indices:
            self._structured.go_ahead(sampled.numbers(structured), structured.of(tokens))
        return tokens

    def end_drafts(self) -> None:
        """Forget the tokens that ``draft`` has sampled."""
        self._structured.go_back()

    def take_failures(self) -> list[RowFailure]:
        """Return the rows that cannot go on since the last call, by the indices of their tokens."""
        return self._structured.take_failures() if self._grammars else []

    def _classify(self, row: int, state: SamplingState) -> None:
        """Update the sets of rows that need no logits processors: ``_simple``, and ``_plain`` if they are greedy."""
        simple = state.params.logprobs is None and not state.needs_processing
        (self._simple.add if simple else self._simple.discard)(row)
        (self._plain.add if simple and state.params.temperature == 0 else self._plain.discard)(row)

    def _process(
        self, raw: torch.Tensor, sampled: SampledRows, forced: Mapping[int, int], drafts: Drafts
    ) -> torch.Tensor:
        logits = raw.clone(memory_format=torch.contiguous_format)
        if sampled.penalised.indices:
            self._penalties.apply(logits, sampled.numbers(sampled.penalised), sampled.penalised.indices)
        sampled.constrain(logits, self._upload)
        if forced:
            indices, tokens = self._upload(np.array([list(forced), list(forced.values())], np.int64))
            logits[indices] = _NEGATIVE
            logits[indices, tokens] = 0.0
        structured = sampled.structured
        if structured.indices:
            forbidden = self._structured.forbidden(sampled.numbers(structured), structured.indices, drafts)
            _keep_to_grammars(logits, raw, forbidden, structured, restricted=sampled.restricted or bool(forced))
        return logits

    def _update(self, sampled: SampledRows, tokens: torch.Tensor, drafts: Drafts) -> None:
        """Pass ``tokens``, which were sampled for these rows, to penalties, grammars and constraints."""
        penalised, structured = sampled.penalised, sampled.structured
        if penalised.indices:
            self._penalties.count(sampled.numbers(penalised), penalised.of(tokens))
        if structured.indices:
            self._structured.drawn(sampled.numbers(structured), structured.of(tokens), drafts)
        for index in sampled.holding:
            row = sampled.rows[index]
            state = self._states[row]
            state.num_held_back -= 1
            if not state.num_held_back:  # it may end from now on
                self._sampled = None
                self._classify(row, state)
        if followed := sampled.followed:
            on_host = tokens.tolist()
            for number, state in followed:
                state.history += on_host[number].to_bytes(_TOKEN_BYTES, "little")


def _keep_to_grammars(
    logits: torch.Tensor, raw: torch.Tensor, forbidden: torch.Tensor, structured: Selected, *, restricted: bool
) -> None:
    """Mask the tokens that grammars forbid, bool [k, vocab] of the rows ``structured``, in place in logits [n, vocab].

    If that leaves a row no token, its grammar alone decides, on the ``raw`` logits before any processing.
    ``restricted``: whether tokens have been forbidden before, so that no token may be left.
    """
    own = structured.of(logits).masked_fill_(forbidden, _NEGATIVE)
    if restricted:
        nothing = own.amax(dim=-1, keepdim=True) == _NEGATIVE
        own.copy_(torch.where(nothing, structured.of(raw).masked_fill(forbidden, _NEGATIVE), own))
    structured.put(logits, own)
