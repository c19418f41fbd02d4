"""What the owner of an API key has been served: the scheduler charges it, and fairness between keys goes by it."""


class Account:
    """What one key has been served. ``served``: weighted tokens. ``num_waiting``: its sequences that wait, anywhere;
    ``num_prompt_tokens``: prompt tokens of their requests.
    """

    __slots__ = ("num_prompt_tokens", "num_waiting", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.num_waiting = 0
        self.num_prompt_tokens = 0
