"""Samples tokens from logits: penalties, bias and masks, then what ``drawing`` does.

On a GPU nothing waits for the device, unless a row has bad words of several tokens, which depend on what it said last.
What a step sends there goes in a few arrays for all rows, because ``Uploads`` has few buffers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.drawing import Drawing
from pagewise_executor.logprobs import Measure, WantedLogprobs, want
from pagewise_executor.penalties import Penalties, penalises
from pagewise_executor.rows import Int32s
from pagewise_executor.uploads import Uploads

_NEGATIVE = float("-inf")


@dataclass(slots=True)
class RowSampling:
    """What the sampler remembers of a row.

    ``history``: all tokens, only for rows with bad words of several.
    """

    params: SamplingParams
    num_output_tokens: int
    history: list[int] | None = None

    @property
    def shapes_logits(self) -> bool:
        """Whether logits change before the draw (other than by temperature and filters)."""
        p = self.params
        return bool(
            penalises(p)
            or p.logit_bias
            or p.allowed_token_ids
            or p.bad_words
            or (p.stop_token_ids and p.min_tokens > self.num_output_tokens)
        )

    def forbidden(self) -> list[int]:
        """Tokens that may not come now."""
        p = self.params
        found = list(p.stop_token_ids) if p.min_tokens > self.num_output_tokens else []
        for word in p.bad_words:
            prefix = len(word) - 1
            if prefix == 0 or (self.history is not None and self.history[-prefix:] == list(word[:-1])):
                found.append(word[-1])
        return found


class Sampler:
    """Samples for the rows of one executor, from logits on ``device``."""

    def __init__(self, drawing: Drawing, penalties: Penalties, measure: Measure, device: torch.device) -> None:
        self._upload = Uploads(device)
        self._drawing, self._penalties, self._measure = drawing, penalties, measure
        self._rows: dict[int, RowSampling] = {}
        self._plain: set[int] = set()
        self._simple: set[int] = set()

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A sequence takes ``row``; ``tokens`` are all its known tokens."""
        state = RowSampling(params, len(tokens) - num_prompt_tokens)
        if penalises(params):
            self._penalties.join(row, tokens, num_prompt_tokens, params)
        if any(len(word) > 1 for word in params.bad_words):
            state.history = tokens.tolist()
        self._rows[row] = state
        self._drawing.join(row, params)
        simple = params.logprobs is None and not state.shapes_logits
        (self._simple.add if simple else self._simple.discard)(row)
        (self._plain.add if simple and params.temperature == 0 else self._plain.discard)(row)

    def leave(self, row: int) -> None:
        """The row's sequence is gone."""
        self._rows.pop(row, None)
        self._plain.discard(row)
        self._simple.discard(row)

    def are_simple(self, rows: list[int]) -> bool:
        """Whether ``drawing`` is all that sampling is for these rows: nothing shapes their logits or reports them."""
        return self._simple.issuperset(rows)

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, WantedLogprobs | None]:
        """Tokens int64 [n] for ``rows``, from ``logits`` [n, vocab], and the log-probabilities that are wanted of them.

        ``positions`` int64 [n]: absolute position of the token that is drawn.
        """
        if self._plain.issuperset(rows):
            return logits.argmax(dim=-1), None
        states = [self._rows[row] for row in rows]
        raw = logits.float()
        penalised = [i for i, state in enumerate(states) if penalises(state.params)]
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        picked = self._upload(np.array(penalised + wanted, np.int64))
        of_penalised, of_wanted = torch.split(picked, [len(penalised), len(wanted)])
        shaped = raw
        if any(state.shapes_logits for state in states):
            shaped = raw.clone(memory_format=torch.contiguous_format)
            if penalised:
                self._penalties.apply(shaped, [rows[i] for i in penalised], penalised)
            self._shape(shaped, states)
        tokens = self._drawing.draw(shaped, rows, positions)
        if penalised:
            self._penalties.count([rows[i] for i in penalised], tokens.index_select(0, of_penalised))
        self._remember(states, tokens)
        if not wanted:
            return tokens, None
        counts = [states[i].params.logprobs for i in wanted]
        own, drawn = raw.index_select(0, of_wanted), tokens.index_select(0, of_wanted)
        return tokens, want(own, drawn, wanted, counts, self._measure)

    def _shape(self, logits: torch.Tensor, states: list[RowSampling]) -> None:
        """Bias and masks, in place, of contiguous logits [n, vocab]."""
        size = logits.shape[1]
        biased: list[int] = []
        biases: list[float] = []
        limited: list[int] = []
        allowed: list[int] = []
        forbidden: list[int] = []
        for number, state in enumerate(states):
            first, p = number * size, state.params
            biased += [first + token for token in p.logit_bias or ()]
            biases += (p.logit_bias or {}).values()
            if p.allowed_token_ids:
                limited.append(number)
                allowed += [first + token for token in p.allowed_token_ids]
            forbidden += [first + token for token in state.forbidden()]
        lists = [biased, limited, allowed, forbidden]
        if not any(lists):
            return
        packed = self._upload(np.concatenate([np.array(each, np.int64) for each in lists]))
        at_biased, of_limited, at_allowed, at_forbidden = torch.split(packed, [len(each) for each in lists])
        flat = logits.view(-1)
        if biased:
            flat.index_add_(0, at_biased, self._upload(np.array(biases, np.float32)))
        if limited:
            kept = flat.index_select(0, at_allowed)
            logits.index_fill_(0, of_limited, _NEGATIVE)
            flat.index_copy_(0, at_allowed, kept)
        if forbidden:
            flat.index_fill_(0, at_forbidden, _NEGATIVE)

    def _remember(self, states: list[RowSampling], tokens: torch.Tensor) -> None:
        """The rows have drawn ``tokens``."""
        for state in states:
            state.num_output_tokens += 1
        followed = [(i, state.history) for i, state in enumerate(states) if state.history is not None]
        if followed:
            drawn = tokens.tolist()
            for i, history in followed:
                history.append(drawn[i])
