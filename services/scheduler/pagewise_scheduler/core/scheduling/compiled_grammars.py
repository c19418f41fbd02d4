"""Which grammars an executor has compiled: no sequence starts before its own is, or steps would wait for it.

An executor compiles grammars beside its steps when it is asked to, and keeps those that it was asked for or that joined
last. Which these are is not told, but counted along here, with half of the room: so what is still on its way to the
executor, in another order perhaps, makes no difference.
"""

from collections import OrderedDict
from itertools import count

from pagewise_shared.protocol import CompileGrammar
from pagewise_shared.protocol.limits import MAX_COMPILED_CHARACTERS

_MOST_ASKED = 16
"""Grammars that the executor is asked for at a time, so that whoever becomes next does not wait for all others."""


class CompiledGrammars:
    """The grammars of one executor. ``num_kept``: how many it keeps; 0: it compiles none before their sequences join,
    so that nobody waits here."""

    def __init__(self) -> None:
        self.num_kept = 0
        self._known: OrderedDict[str, bool] = OrderedDict()  # whether it is compiled; the least recently used first
        self._characters = 0
        self._asked: dict[int, str] = {}
        self._unsent: list[int] = []
        self._numbers = count(1)

    def is_ready(self, grammar: str) -> bool:
        """Whether a sequence with this grammar (empty: without one) may start. If not, it is asked for."""
        if not grammar or not self.num_kept:
            return True
        known = self._known.get(grammar)
        if known is None and len(self._asked) < min(_MOST_ASKED, -(-self._most // 2)):
            number = next(self._numbers)
            self._asked[number] = grammar
            self._unsent.append(number)
            self._note(grammar, compiled=False)
        return known is True

    def take_questions(self, epoch: int) -> list[CompileGrammar]:
        """Return what the executor is to compile, and has not been told yet."""
        questions = [CompileGrammar(epoch, number, self._asked[number]) for number in self._unsent]
        self._unsent.clear()
        return questions

    def compiled(self, number: int) -> None:
        """The executor has answered a question; what nobody has asked is ignored."""
        grammar = self._asked.pop(number, None)
        if grammar is not None and grammar in self._known:
            self._known[grammar] = True

    def joined(self, grammar: str) -> None:
        """A sequence with this grammar (empty: without one) joins: the executor keeps it longer than others."""
        if grammar and self.num_kept:
            self._note(grammar, compiled=True)

    def clear(self) -> None:
        """The executor has been reset, or is gone: it answers no question any more."""
        self._known.clear()
        self._asked.clear()
        self._unsent.clear()
        self._characters = 0

    @property
    def _most(self) -> int:
        return max(1, self.num_kept // 2)

    def _note(self, grammar: str, *, compiled: bool) -> None:
        if grammar not in self._known:
            self._characters += len(grammar)
        self._known[grammar] = compiled
        self._known.move_to_end(grammar)
        while len(self._known) > self._most or (
            self._characters > MAX_COMPILED_CHARACTERS // 2 and len(self._known) > 1
        ):
            self._characters -= len(self._known.popitem(last=False)[0])
