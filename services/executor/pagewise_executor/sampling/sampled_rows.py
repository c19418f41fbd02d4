"""What the sampler needs of all rows of a step. It is kept from step to step while the same sequences are sampled.

There may be many rows with long lists of tokens. Going through them in Python takes several milliseconds, which would
otherwise be spent in every step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.input_batch import Int32s, Int64s
from pagewise_executor.sampling.constraint_tables import ConstraintTable
from pagewise_executor.uploads import Uploads

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
    """The ``rows`` of a step, in order. Indices are into this list, or into logits [n, vocab] as one flat array.

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
