"""The grammars that an executor has compiled. No sequence starts before its grammar is: steps would wait for it.

An executor compiles grammars beside its steps when it is asked to. It keeps the grammars that were asked for or joined
most recently. It does not report which: the scheduler keeps an LRU list of its own, half as long. So messages that are
still on their way to the executor, possibly in another order, make no difference.
"""

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

from pagewise_shared.protocol import CompileGrammar, GrammarCompiled, Message
from pagewise_shared.protocol.limits import MAX_COMPILED_CHARACTERS

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.requests.request import RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_MOST_ASKED = 16
"""Grammars that the executor is asked for at a time: a request that becomes next does not wait for all others."""


class CompiledGrammars(Feature):
    """The grammars of one executor. ``num_kept``: how many grammars it keeps compiled."""

    cause = "grammar"

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self.num_kept = scheduler.features.options.max_grammars
        self._known: OrderedDict[str, bool] = OrderedDict()  # whether it is compiled; the least recently used first
        self._characters = 0
        self._asked: dict[int, str] = {}
        self._unsent: list[int] = []
        self._numbers = count(1)

    def may_start(self, sequence: RequestSequence) -> bool:
        """Whether the sequence's grammar is compiled; asks the executor for it if not."""
        grammar = sequence.sampling.grammar
        known = self._known.get(grammar)
        if known is None and len(self._asked) < min(_MOST_ASKED, -(-self._most // 2)):
            number = next(self._numbers)
            self._asked[number] = grammar
            self._unsent.append(number)
            self._note(grammar, compiled=False)
        return known is True

    def messages(self, now: float) -> list[Message]:
        epoch, unsent = self.scheduler.epoch, self._unsent
        self._unsent = []
        return [CompileGrammar(epoch, number, self._asked[number]) for number in unsent]

    def take(self, message: Message, now: float) -> tuple[()]:
        if isinstance(message, GrammarCompiled):  # an answer to an unknown question is ignored
            grammar = self._asked.pop(message.number, None)
            if grammar is not None and grammar in self._known:
                self._known[grammar] = True
        return ()

    def joined(self, sequence: RequestSequence) -> None:
        self._note(sequence.sampling.grammar, compiled=True)

    def clear(self) -> None:
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
