"""Texts of random tokens that share beginnings, as the turns of conversations do."""

import random

from tests.model_builders import VOCAB_SIZE

MOST_PROMPT = 90
"""Tokens of a text that was made of another one; others have up to 20 more."""


class Texts:
    """The latest texts that were told, of which the next prompts are made."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._texts = [self.random(length) for length in (70, 33, 16, 5)]

    def random(self, length: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    def prompt(self) -> list[int]:
        """A new conversation, or a turn, a fork or an edit of one."""
        rng = self._rng
        # Most of them recent; now and then an old one, of which lower tiers have the blocks.
        near = min(len(self._texts), rng.choice((8, 8, 30, 200)))
        text = self._texts[-rng.randrange(1, near + 1)]
        match rng.randrange(8):
            case 0:
                made = self._texts[rng.randrange(4)] + self.random(rng.randrange(1, 30))
            case 1 | 2 | 3:
                made = text + self.random(rng.randrange(1, 8))
            case 4:
                made = text[: rng.randrange(1, len(text) + 1)] + self.random(rng.randrange(1, 12))
            case 5:
                at = rng.randrange(len(text))
                made = text[:at] + self.random(rng.randrange(3)) + text[at + 1 :]
            case 6:
                made = text[: rng.randrange(1, len(text) + 1)]
            case _:
                made = list(text)
        return made[:MOST_PROMPT] if 0 < len(made) <= MOST_PROMPT + 20 else self.random(rng.randrange(1, 60))

    def tell(self, text: list[int]) -> None:
        """Remember a text."""
        if len(self._texts) > 300:
            del self._texts[4]
        self._texts.append(text)
