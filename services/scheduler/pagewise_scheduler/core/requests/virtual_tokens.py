"""Virtual token counters: who has been served how much, so that no key gets more than its share while others wait.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each key has a counter of the tokens it has been
served, weighted; of the keys that wait, the one with the least goes first. Two keys that both wait all the time are
then served amounts that differ by a bounded number of tokens, however many requests each sends.
"""

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token takes a place in a step of its own; prompt tokens are computed many at a time."""


class Account:
    """What one key has been served. ``served``: weighted tokens. ``num_waiting``: its sequences that wait, anywhere;
    ``num_prompt_tokens``: prompt tokens of their requests.
    """

    __slots__ = ("num_prompt_tokens", "num_waiting", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.num_waiting = 0
        self.num_prompt_tokens = 0


class VirtualTokens:
    """The accounts of all keys. The schedulers of one fleet share them: a key is not served twice for coming twice."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[Account, None] = {}
        self._last_to_leave: Account | None = None

    def account(self, key: str) -> Account:
        """The account of a key, by its name."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account()
        return account

    def arrive(self, account: Account) -> None:
        """A request comes in: a key that did not wait is lifted to those that do, because unused turns are not saved.

        Where nobody waits, to the one that waited last.
        """
        if account.num_waiting:
            return
        if self._waiting:
            account.served = max(account.served, min(other.served for other in self._waiting))
        elif self._last_to_leave is not None:
            account.served = max(account.served, self._last_to_leave.served)

    def wait(self, account: Account, prompt_tokens: int, count: int = 1) -> None:
        """``count`` more of its sequences wait, which count for so many prompt tokens."""
        account.num_waiting += count
        account.num_prompt_tokens += prompt_tokens
        self._waiting[account] = None

    def leave(self, account: Account, prompt_tokens: int, count: int = 1) -> None:
        """``count`` of its sequences wait no more."""
        account.num_waiting -= count
        account.num_prompt_tokens -= prompt_tokens
        if not account.num_waiting:
            del self._waiting[account]
            self._last_to_leave = account
