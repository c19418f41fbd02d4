"""Prompts of random words, of about as many tokens as a workload asks for."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

WORDS = resources.files("pagewise.bench").joinpath("words.txt").read_text().split()
"""Common English words, so that no tokenizer is favoured by what its vocabulary was made of."""

DEFAULT_TOKENS_PER_WORD = 1.3
"""Assumed of a server that does not say how many tokens a prompt has."""


@dataclass(frozen=True, slots=True)
class Words:
    """A part of a prompt: random words of about ``tokens`` tokens. Parts of one ``key`` and length are equal."""

    key: str
    tokens: int


Part = Words | str
"""A part of a prompt: random words, or a text that is given."""


class Texts:
    """Makes texts of parts.

    ``salt``: parts of another salt have other words, so that no cache holds them from an earlier round or run.
    ``salt_given``: also put it in front of texts that begin with a given one. ``tokens_per_word`` and ``overhead``:
    what the server has counted; the overhead is that of a prompt without words, such as a chat template's.
    """

    def __init__(
        self,
        salt: str,
        *,
        tokens_per_word: float = DEFAULT_TOKENS_PER_WORD,
        overhead: float = 0.0,
        salt_given: bool = True,
    ) -> None:
        self._salt = salt
        self._tokens_per_word = tokens_per_word
        self._overhead = overhead
        self._salt_given = salt_given
        self._words = lru_cache(maxsize=4096)(self._random_words)

    def text(self, parts: Sequence[Part], *, first: bool = True) -> str:
        """Return the text of a prompt. ``first``: it begins a conversation, so the overhead is part of its length."""
        texts = []
        for number, part in enumerate(parts):
            if isinstance(part, Words):
                less = self._overhead if first and number == 0 else 0.0
                texts.append(self._words(part.key, max(1, round((part.tokens - less) / self._tokens_per_word))))
            else:
                given_salt = first and number == 0 and self._salt_given
                texts.append(f"[{self._salt}] {part}" if given_salt else part)
        return " ".join(texts)

    def _random_words(self, key: str, count: int) -> str:
        rng = random.Random(f"{self._salt} {key}")  # noqa: S311  # nosec B311 # no secret
        return " ".join(rng.choices(WORDS, k=count))


def calibrate(few: tuple[int, int], many: tuple[int, int]) -> tuple[float, float]:
    """Return tokens per word and overhead of a prompt, from the (words, tokens) of a short and of a long prompt."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if per_word <= 0:  # a server that counts something else
        return DEFAULT_TOKENS_PER_WORD, 0.0
    return per_word, max(0.0, few[1] - few[0] * per_word)
