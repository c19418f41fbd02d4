"""Samples the tokens of a step: logits processors (penalties, bias, masks), then the token sampler.

On a GPU nothing here waits for the device, unless a row has bad words of several tokens, which depend on the tokens
that were sampled last. All rows of a step share a few uploaded arrays, because ``Uploads`` has few buffers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.input_batch import Int32s
from pagewise_executor.sampling.constraint_tables import ConstraintTable, ConstraintTables
from pagewise_executor.sampling.logprobs import ComputeLogprobs, LogprobsTensors, gather_logprobs
from pagewise_executor.sampling.penalties import Penalties, has_penalties
from pagewise_executor.sampling.token_sampler import TokenSampler
from pagewise_executor.uploads import Uploads

_NEGATIVE = float("-inf")
_TOKEN_BYTES = 4


@dataclass(slots=True)
class SamplingState:
    """The sampler's state of one sequence.

    ``table``: of its token constraints, if it has any. ``history``: all its tokens (int32 bytes); kept only if it has
    bad words of several tokens.
    """

    params: SamplingParams
    num_output_tokens: int
    table: ConstraintTable | None = None
    history: bytearray | None = None

    @property
    def needs_processing(self) -> bool:
        """Whether logits processors change the logits before the token sampler sees them."""
        p = self.params
        holds_back_stops = bool(p.stop_token_ids) and p.min_tokens > self.num_output_tokens
        return has_penalties(p) or self.table is not None or holds_back_stops

    def forbidden_now(self) -> list[int]:
        """Return the tokens that must not be sampled next, beside those that never may."""
        p = self.params
        found = list(p.stop_token_ids) if p.min_tokens > self.num_output_tokens else []
        if self.table is not None and self.history is not None:
            found += self.table.completing(self.history)
        return found


class Sampler:
    """Samples the tokens of all rows of one executor, from logits on ``device``."""

    def __init__(
        self,
        token_sampler: TokenSampler,
        penalties: Penalties,
        tables: ConstraintTables,
        compute: ComputeLogprobs,
        device: torch.device,
    ) -> None:
        self._upload = Uploads(device)
        self._token_sampler, self._penalties, self._compute_logprobs = token_sampler, penalties, compute
        self._tables = tables
        self._rows: dict[int, SamplingState] = {}
        self._plain: set[int] = set()
        self._simple: set[int] = set()

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Take over a sequence that joins in ``row``; ``tokens`` are all its known tokens."""
        state = SamplingState(params, len(tokens) - num_prompt_tokens)
        if has_penalties(params):
            self._penalties.join(row, tokens, num_prompt_tokens, params)
        if params.constraints is not None:
            state.table = self._tables.of(params.constraints)
            if state.table.bad_words:
                state.history = bytearray(tokens.tobytes())
        self._rows[row] = state
        self._token_sampler.join(row, params)
        simple = params.logprobs is None and not state.needs_processing
        (self._simple.add if simple else self._simple.discard)(row)
        (self._plain.add if simple and params.temperature == 0 else self._plain.discard)(row)

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row``."""
        self._rows.pop(row, None)
        self._plain.discard(row)
        self._simple.discard(row)

    def are_simple(self, rows: list[int]) -> bool:
        """Whether these rows need the token sampler only: no logits processors, and no log-probabilities."""
        return self._simple.issuperset(rows)

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one token for each of ``rows`` from ``logits`` [n, vocab].

        ``positions`` int64 [n]: the positions of the sampled tokens in their sequences. Returns the tokens int64 [n],
        and the log-probabilities that were requested for them, if any.
        """
        if self._plain.issuperset(rows):
            return logits.argmax(dim=-1), None
        states = [self._rows[row] for row in rows]
        raw = logits.float()
        penalised = [i for i, state in enumerate(states) if has_penalties(state.params)]
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        picked = self._upload(np.array(penalised + wanted, np.int64))
        of_penalised, of_wanted = torch.split(picked, [len(penalised), len(wanted)])
        processed = raw
        if any(state.needs_processing for state in states):
            processed = raw.clone(memory_format=torch.contiguous_format)
            if penalised:
                self._penalties.apply(processed, [rows[i] for i in penalised], penalised)
            self._process(processed, states)
        tokens = self._token_sampler.sample(processed, rows, positions)
        if penalised:
            self._penalties.count([rows[i] for i in penalised], tokens.index_select(0, of_penalised))
        self._update(states, tokens)
        if not wanted:
            return tokens, None
        counts = [states[i].params.logprobs for i in wanted]
        own, sampled = raw.index_select(0, of_wanted), tokens.index_select(0, of_wanted)
        return tokens, gather_logprobs(own, sampled, wanted, counts, self._compute_logprobs)

    def _process(self, logits: torch.Tensor, states: list[SamplingState]) -> None:
        """Apply bias and masks, in place, to contiguous logits [n, vocab]."""
        size = logits.shape[1]
        biased: list[npt.NDArray[np.int64]] = []
        biases: list[npt.NDArray[np.float32]] = []
        masks: dict[ConstraintTable, int] = {}
        limited: list[int] = []
        mask_of: list[int] = []
        forbidden: list[int] = []
        for number, state in enumerate(states):
            first, table = number * size, state.table
            if table is not None:
                if len(table.biased):
                    biased.append(table.biased + first)
                    biases.append(table.biases)
                if table.forbidden is not None:
                    limited.append(number)
                    mask_of.append(masks.setdefault(table, len(masks)))
            forbidden += [first + token for token in state.forbidden_now()]
        if biased:
            logits.view(-1).index_add_(0, self._upload(np.concatenate(biased)), self._upload(np.concatenate(biases)))
        if not (limited or forbidden):
            return
        packed = self._upload(np.array(limited + mask_of + forbidden, np.int64))
        of_limited, of_masks, at_forbidden = torch.split(packed, [len(limited), len(mask_of), len(forbidden)])
        if limited:
            # Rows of one request share a mask, so there are seldom many different ones.
            stacked = torch.stack([table.forbidden for table in masks if table.forbidden is not None])
            masked = logits.index_select(0, of_limited).masked_fill_(stacked.index_select(0, of_masks), _NEGATIVE)
            logits.index_copy_(0, of_limited, masked)
        if forbidden:
            logits.view(-1).index_fill_(0, at_forbidden, _NEGATIVE)

    def _update(self, states: list[SamplingState], tokens: torch.Tensor) -> None:
        """Note that ``tokens`` were sampled for these sequences."""
        for state in states:
            state.num_output_tokens += 1
        followed = [(i, state.history) for i, state in enumerate(states) if state.history is not None]
        if followed:
            sampled = tokens.tolist()
            for i, history in followed:
                history += sampled[i].to_bytes(_TOKEN_BYTES, "little")
