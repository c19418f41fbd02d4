"""Documents and questions made of the standard library's sources, which the demo model was trained on."""

import random
import sysconfig
from pathlib import Path

from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.model_files import resolve_model


class Texts:
    """Tokens of modules in random order; none is given twice."""

    def __init__(self, seed: int) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        random.Random(seed).shuffle(paths)
        self._tokenizer = Tokenizer.load(resolve_model("pagewise-demo"))
        self._unread = paths
        self._rests: list[list[int]] = []

    def take(self, length: int) -> list[int]:
        """The next tokens, of one module: of one that is new, as long as there is any.

        Raises:
            ValueError: no module has so many left.
        """
        while self._unread:
            tokens = self._tokenizer.encode(self._unread.pop().read_text(encoding="utf-8"))
            if len(tokens) >= length:
                self._rests.insert(0, list(tokens[length:]))
                return list(tokens[:length])
        for number, rest in enumerate(self._rests):
            if len(rest) >= length:
                self._rests.append(self._rests.pop(number)[length:])
                return rest[:length]
        raise ValueError(f"no module of the standard library has {length} tokens left")
