"""How large a step may be: the configured limits, narrowed for a while after a step has failed."""

_GOOD_STEPS_TO_WIDEN = 16


class StepLimits:
    """Limits of one step: ``max_num_seqs`` sequences and ``max_num_batched_tokens`` tokens.

    A failed step halves both; a run of good steps doubles them again, up to what was configured. Repeated failures
    therefore end at a step with a single sequence, which shows the request that cannot run even alone.
    """

    __slots__ = (
        "_good_steps",
        "configured_num_batched_tokens",
        "configured_num_seqs",
        "max_num_batched_tokens",
        "max_num_seqs",
    )

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError("a step holds at least one sequence and one token")
        # Decodes go first and each takes one token: the budget has to hold all of them.
        self.configured_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.configured_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = self.configured_num_seqs
        self.max_num_batched_tokens = self.configured_num_batched_tokens
        self._good_steps = 0

    def step_failed(self, num_seqs: int, num_tokens: int) -> None:
        """A step of this size failed: go below half of it."""
        self._good_steps = 0
        self.max_num_seqs = max(1, min(self.max_num_seqs, num_seqs) // 2)
        self.max_num_batched_tokens = max(self.max_num_seqs, min(self.max_num_batched_tokens, num_tokens) // 2)

    def step_succeeded(self) -> None:
        """A step came back: after enough of them, widen again."""
        if (
            self.max_num_seqs == self.configured_num_seqs
            and self.max_num_batched_tokens == self.configured_num_batched_tokens
        ):
            return
        self._good_steps += 1
        if self._good_steps >= _GOOD_STEPS_TO_WIDEN:
            self._good_steps = 0
            self.max_num_seqs = min(self.configured_num_seqs, self.max_num_seqs * 2)
            self.max_num_batched_tokens = min(self.configured_num_batched_tokens, self.max_num_batched_tokens * 2)
