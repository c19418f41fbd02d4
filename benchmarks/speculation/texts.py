"""The requests of the benchmark: a prompt, and the output that they get. Sources come from the standard library of the
Python that runs this, and Pagewise's own documents."""

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewise_gateway.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "argparse", "ast", "configparser", "csv", "datetime", "difflib", "fractions", "heapq", "inspect", "mailbox",
    "optparse", "pprint", "queue", "random", "shutil", "statistics", "tarfile", "tempfile", "textwrap", "zipfile",
)  # fmt: skip
PROMPT = 500
"""Tokens of most prompts."""


@dataclass(frozen=True)
class Text:
    """Token ids."""

    prompt: list[int]
    output: list[int]


class Texts:
    """Makes texts of each of ``KINDS``, outputs of ``output`` tokens. ``modules``: whose code it takes."""

    def __init__(self, tokenizer: Tokenizer, output: int, modules: Sequence[str] = MODULES) -> None:
        self._encode: Callable[[str], list[int]] = lambda text: list(tokenizer.encode(text))
        self._output = output
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [library / f"{name.replace('.', '/')}.py" for name in modules]
        self._code = [file.read_text(encoding="utf-8") for file in files if file.exists()]
        self._prose = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))]

    def make(self, kind: str, number: int) -> Text:
        """The text of that number. The same number gives the same text."""
        rng = random.Random(f"{kind} {number}")
        if kind == "random":
            ids = [rng.randrange(10, 4000) for _ in range(PROMPT + self._output)]
            return Text(ids[:PROMPT], ids[PROMPT:])
        if kind in ("rewriting", "editing"):
            before = self._piece(self._code, rng, PROMPT)
            after = renamed(before) if kind == "rewriting" else edited(before, rng)
            return Text(self._encode(before + "\n\n"), self._encode(after)[: self._output])
        # The text of a file, after as much of it as a request might show.
        ids = self._encode(self._piece(self._code if kind == "completion" else self._prose, rng, PROMPT + self._output))
        return Text(ids[: len(ids) - self._output], ids[len(ids) - self._output :])

    def _piece(self, texts: list[str], rng: random.Random, tokens: int) -> str:
        """Whole lines of about so many tokens, from anywhere."""
        lines = rng.choice([text for text in texts if len(text) > 8 * tokens]).splitlines(keepends=True)
        start = rng.randrange(len(lines) // 2)
        taken, count = "", 0
        for line in lines[start:]:
            taken, count = taken + line, count + len(self._encode(line))
            if count >= tokens:
                break
        return taken


KINDS = ("rewriting", "editing", "completion", "prose", "random")
"""rewriting: code, one of whose names is another one; editing: code, one of ten lines of which is another one or gone;
completion: the next lines of a module; prose: the next lines of a document; random: tokens."""


def renamed(code: str) -> str:
    """The code with another name in place of its most frequent one."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", code))
    (name, _), *_ = names.most_common(1)
    return re.sub(rf"\b{name}\b", "renamed_value", code)


def edited(code: str, rng: random.Random) -> str:
    """The code with one of ten lines replaced by another one, or removed."""
    lines = code.splitlines(keepends=True)
    kept = []
    for line in lines:
        if rng.random() >= 0.1:
            kept.append(line)
        elif rng.random() < 0.5:
            kept.append(rng.choice(lines))
    return "".join(kept)
