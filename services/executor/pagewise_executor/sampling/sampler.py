"""Samples the tokens of a step: logits processors (penalties, bias, masks, grammars), then the token sampler.

On a GPU nothing here waits for the device, unless a row has a grammar or bad words of several tokens, which depend on
the tokens that were sampled last. All rows of a step share a few uploaded arrays, because ``Uploads`` has few buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.protocol import RowFailure
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.input_batch import Int32s, Int64s
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.sampling.constraint_tables import ConstraintTable, ConstraintTables
from pagewise_executor.sampling.logprobs import ComputeLogprobs, LogprobsTensors, gather_logprobs
from pagewise_executor.sampling.penalties import Penalties
from pagewise_executor.sampling.token_sampler import TokenSampler
from pagewise_executor.structured.structured_rows import StructuredRows
from pagewise_executor.uploads import Uploads

_NEGATIVE = float("-inf")
_TOKEN_BYTES = 4


_NO_TOKENS: Int64s = np.zeros(0, np.int64)


@dataclass(slots=True)
class SamplingState:
    """The sampler's state of one sequence.

    Fields:
        penalised: whether any penalty is in effect.
        num_held_back: for how many more tokens the sequence must not end; held_back: int64 [n], the tokens that would
            end it, empty if that number was 0 from the beginning.
        table: of its token constraints, if it has any.
        history: all its tokens (int32 bytes); kept only if it has bad words of several tokens.
    """

    params: SamplingParams
    penalised: bool
    num_held_back: int
    held_back: Int64s
    table: ConstraintTable | None
    history: bytearray | None

    @property
    def needs_processing(self) -> bool:
        """Whether logits processors change the logits before the token sampler sees them."""
        return self.penalised or self.forbids or bool(self.params.grammar)

    @property
    def forbids(self) -> bool:
        """Whether something other than its grammar may forbid tokens."""
        return self.table is not None or self.num_held_back > 0


def sampling_state(
    tokens: Int32s, num_prompt_tokens: int, params: SamplingParams, table: ConstraintTable | None
) -> SamplingState:
    """Return the state of a sequence with these known tokens, before the next one is sampled."""
    num_held_back = max(0, params.min_tokens - (len(tokens) - num_prompt_tokens)) if params.stop_token_ids else 0
    return SamplingState(
        params,
        penalised=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0),
        num_held_back=num_held_back,
        held_back=np.array(params.stop_token_ids, np.int64) if num_held_back else _NO_TOKENS,
        table=table,
        history=bytearray(tokens.tobytes()) if table is not None and table.bad_words else None,
    )


@dataclass(slots=True, frozen=True)
class SampledRows:
    """What sampling needs of the ``rows`` of a step, in order, kept while the same sequences are sampled: there may be
    many rows with long lists of tokens, and going through them in Python takes several milliseconds.

    Indices are into the list of rows, or into logits [n, vocab] as one flat array.

    Fields:
        needs_processing: whether any logits processor changes any logits.
        penalised: indices of rows with penalties, also on the device as ``at_penalised``.
        reporting: indices of rows that report log-probabilities, also on the device as ``at_reporting``; counts: how
            many alternatives each of them reports.
        biased, biases: flat indices of logits, and what is added to them; None: nothing is.
        limited: indices int64 [k] of rows with tokens that may never be sampled; None: they are all rows. masks: bool
            [k, vocab] of these tokens; None: no row has any.
        held_back: flat indices of the tokens that would end a sequence too early; None: there are none.
        holding: the rows that have some.
        followed: index, constraints and history of each row with bad words of several tokens.
        structured: indices of rows with grammars, also on the device as ``at_structured``; None there: they are all
            rows. restricted: whether something else forbids tokens in one of them.
        searched: indices, among those that report log-probabilities, of hypotheses of beam searches with grammars.
    """

    rows: list[int]
    needs_processing: bool
    penalised: list[int]
    at_penalised: torch.Tensor
    reporting: list[int]
    at_reporting: torch.Tensor
    counts: list[int | None]
    biased: torch.Tensor | None
    biases: torch.Tensor | None
    limited: torch.Tensor | None
    masks: torch.Tensor | None
    held_back: torch.Tensor | None
    holding: list[int]
    followed: list[tuple[int, ConstraintTable, bytearray]]
    structured: list[int]
    at_structured: torch.Tensor | None
    restricted: bool
    searched: list[int]


def sampled_rows(rows: list[int], states: Mapping[int, SamplingState], vocab_size: int, upload: Uploads) -> SampledRows:
    """Put together what the sampler needs of these rows."""
    of_rows = list(enumerate(states[row] for row in rows))
    penalised = [i for i, state in of_rows if state.penalised]
    reporting = [i for i, state in of_rows if state.params.logprobs is not None]
    holding = [i for i, state in of_rows if state.num_held_back]
    with_table = [(i, state.table) for i, state in of_rows if state.table is not None]
    biased = [(i, table) for i, table in with_table if len(table.biased)]
    structured = [i for i, state in of_rows if state.params.grammar]
    masked = [(i, table.forbidden) for i, table in with_table if table.forbidden is not None]
    limited = [i for i, _ in masked]
    # Rows of one request share a mask, so there are seldom many different ones.
    number_of = {mask: number for number, mask in enumerate(dict.fromkeys(mask for _, mask in masked))}
    lists = [
        np.array(penalised, np.int64),
        np.array(reporting, np.int64),
        np.array(limited, np.int64),
        np.array([number_of[mask] for _, mask in masked], np.int64),
        _flat(holding, [states[rows[i]].held_back for i in holding], vocab_size),
        _flat([i for i, _ in biased], [table.biased for _, table in biased], vocab_size),
        np.array(structured, np.int64),
    ]
    at_penalised, at_reporting, at_limited, at_masks, held_back, at_biased, at_structured = torch.split(
        upload(np.concatenate(lists)), [len(one) for one in lists]
    )
    masks = torch.stack(list(number_of)).index_select(0, at_masks) if masked else None
    return SampledRows(
        rows=rows,
        needs_processing=any(state.needs_processing for _, state in of_rows),
        penalised=penalised,
        at_penalised=at_penalised,
        reporting=reporting,
        at_reporting=at_reporting,
        counts=[states[rows[i]].params.logprobs for i in reporting],
        biased=at_biased if biased else None,
        biases=upload(np.concatenate([table.biases for _, table in biased])) if biased else None,
        limited=at_limited if len(limited) < len(rows) else None,
        masks=masks,
        held_back=held_back if holding else None,
        holding=[rows[i] for i in holding],
        followed=[
            (i, state.table, state.history)
            for i, state in of_rows
            if state.table is not None and state.history is not None
        ],
        structured=structured,
        at_structured=at_structured if len(structured) < len(rows) else None,
        restricted=any(states[rows[i]].forbids for i in structured),
        searched=[
            number
            for number, i in enumerate(reporting)
            if states[rows[i]].params.beam and states[rows[i]].params.grammar
        ],
    )


def _flat(indices: list[int], tokens: list[npt.NDArray[np.int64]], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the indices in logits [n, vocab], as one flat array, of the tokens of each of the rows at ``indices``."""
    if not indices:
        return _NO_TOKENS
    first = np.array(indices, np.int64) * vocab_size
    return np.concatenate(tokens) + np.repeat(first, [len(one) for one in tokens])


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
