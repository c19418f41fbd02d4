"""Virtual token counters, so that no key gets more than its share while others wait.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each key has a counter of the weighted tokens
that it has been served. Of the keys that wait, the one with the smallest counter is served first. If two keys wait all
the time, their counters differ by a bounded number of tokens, however many requests each sends.
"""

from collections import defaultdict
from dataclasses import dataclass

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token takes a row of a step; prompt tokens are computed many at a time."""


@dataclass(slots=True, eq=False)
class Account:
    """The service of one key. ``served``: weighted tokens. ``num_waiting``: its waiting sequences in all queues;
    ``num_prompt_tokens``: prompt tokens of their requests."""

    served: float = 0.0
    num_waiting: int = 0
    num_prompt_tokens: int = 0


class VirtualTokens:
    """The accounts of all keys, which all schedulers share: a key with requests at two executors has one share."""

    def __init__(self) -> None:
        self._accounts: defaultdict[str, Account] = defaultdict(Account)
        self._waiting: dict[Account, None] = {}
        self._last_to_leave: Account | None = None

    def account(self, key: str) -> Account:
        """The account of a key, by its name."""
        return self._accounts[key]

    def arrive(self, account: Account) -> None:
        """A request arrives. If its key did not wait, its counter is raised to the smallest one of the waiting keys, or
        of the key that waited last: a key cannot save up turns that it did not use."""
        if account.num_waiting:
            return
        if self._waiting:
            account.served = max(account.served, min(other.served for other in self._waiting))
        elif self._last_to_leave is not None:
            account.served = max(account.served, self._last_to_leave.served)

    def wait(self, account: Account, prompt_tokens: int, count: int = 1) -> None:
        """``count`` more sequences of a key wait, whose requests have ``prompt_tokens`` prompt tokens."""
        account.num_waiting += count
        account.num_prompt_tokens += prompt_tokens
        self._waiting[account] = None

    def leave(self, account: Account, prompt_tokens: int, count: int = 1) -> None:
        """``count`` sequences of a key wait no more."""
        account.num_waiting -= count
        account.num_prompt_tokens -= prompt_tokens
        if not account.num_waiting:
            del self._waiting[account]
            self._last_to_leave = account
