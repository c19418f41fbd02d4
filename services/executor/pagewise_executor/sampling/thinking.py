"""The rows whose thinking has a budget, and the tokens that are forced there when it is used up.

Whether a row still thinks depends on the token that it sampled last, which a GPU may not have computed yet when the
next step is issued. While enough of the budget is left, that token makes no difference. So the host waits for the token
only in the few steps in which the budget ends.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pagewise_shared.thinking import ThinkingState

from pagewise_executor.input_batch import InputBatch
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.step_work import Draft, SequenceState, StepWork
from pagewise_executor.uploads import Uploads


@dataclass(slots=True)
class _Row:
    """A row that may still think.

    Fields:
        state: the state of its output. sampled: the row's tokens since it joined, as far as they have reached the host.
        start: the position of the first token of ``sampled`` in the sequence.
        num_known: the number of these tokens that ``state`` has taken. It may be one more than ``sampled`` has.
        free_until: no token before this position will be forced.
    """

    state: ThinkingState
    sampled: "array[int]"
    start: int
    num_known: int = 0
    free_until: int = 0

    def catch_up(self) -> None:
        self.take(self.sampled[self.num_known :])

    def take(self, tokens: Sequence[int]) -> None:
        self.state.extend(tokens)
        self.num_known += len(tokens)
        self.free_until = self.start + self.num_known + self.state.num_free


class ThinkingRows:
    """The rows of one executor whose sequences have a thinking budget that is not used up.

    ``last_tokens`` int64 [rows or more]: the token that each row sampled last, on the device.
    """

    def __init__(self, last_tokens: torch.Tensor) -> None:
        self._last_tokens = last_tokens
        self._upload = Uploads(last_tokens.device)
        self._rows: dict[int, _Row] = {}

    def join(self, row: int, sequence: SequenceState) -> None:
        """Take over a sequence that joins in ``row``."""
        if (budget := sequence.sampling.thinking) is None:
            return
        state = ThinkingState(budget)
        state.extend(sequence.tokens[sequence.num_prompt_tokens :].tolist())
        if not state.over:
            self._rows[row] = _Row(state, sequence.sampled, len(sequence.tokens))

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row``, which may have had no budget."""
        self._rows.pop(row, None)

    def check_draft(self, draft: Draft) -> None:
        """Check that no token is forced in the place of a draft, or behind it.

        Raises:
            InvalidPlanError: the budget of the row may be used up before.
        """
        if (held := self._rows.get(draft.row)) is not None:
            held.catch_up()
            if held.state.num_free <= len(draft.tokens):
                raise InvalidPlanError(f"row {draft.row} has a draft that its thinking budget may cut off")

    def forced(self, work: StepWork, batch: InputBatch) -> dict[int, int]:
        """Return the tokens that have to be sampled in a step, by index in its sampled rows.

        This must be called before the step computes, because it may read the tokens of the step before.
        """
        if not self._rows:
            return {}
        rows, unsure = work.sampled_rows, dict[int, _Row]()
        positions: list[int] = batch.sampled_positions(work).tolist()
        for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
            held = self._rows.get(row)
            if held is None or position < held.free_until:
                continue
            held.catch_up()
            if held.state.over:
                del self._rows[row]
            elif position >= held.free_until:
                unsure[index] = held
        missing = [index for index, held in unsure.items() if held.start + held.num_known < positions[index]]
        if missing:  # only the last token can be missing: the results of earlier steps are back
            last = self._last_tokens[self._upload(np.array([rows[index] for index in missing], np.int64))]
            for index, token in zip(missing, last.tolist(), strict=True):
                unsure[index].take((token,))
        found = {index: held.state.forced for index, held in unsure.items()}
        return {index: token for index, token in found.items() if token is not None}
