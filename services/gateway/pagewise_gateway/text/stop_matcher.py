"""Finds stop strings in text that arrives in pieces."""

from functools import cached_property


class StopStrings:
    """The stop strings of a request, and the tables by which they are found; all outputs of the request share them.

    The tables are built when the text of an output first contains a character that a stop string begins with, which is
    after the request was admitted. ``include``: whether the stop string stays in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self.stops = stops
        self.include = include
        self.by_first_character: dict[str, list[int]] = {}
        for number, stop in enumerate(stops):
            self.by_first_character.setdefault(stop[0], []).append(number)

    @cached_property
    def failures(self) -> list[list[int]]:
        """The failure function of each stop string."""
        return [_failure_function(stop) for stop in self.stops]


class StopMatcher:
    """Passes text on until a stop string is complete.

    The match that ends first wins, and the longest of those that end at the same character. So the result does not
    depend on how the text was cut into pieces. Text that may be the beginning of a stop string is held back. Work per
    character is constant on average (Knuth, Morris and Pratt, 1977), however long the stop strings are.

    ``matched``: the stop string that was found; no text is returned after it.
    """

    __slots__ = ("_held", "_states", "_strings", "matched")

    def __init__(self, strings: StopStrings) -> None:
        self.matched: str | None = None
        self._strings = strings
        # With how many characters of a stop string the text ends, by its number, if there are any.
        self._states: dict[int, int] = {}
        self._held = ""

    def push(self, text: str) -> str:
        """Take text; return the text that is final. With ``include``, the returned text ends with the stop string."""
        if self.matched is not None:
            return ""
        if not self._held and self._strings.by_first_character.keys().isdisjoint(text):
            return text
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None:
                self.matched = stop
                self._held = ""
                self._states.clear()
                end = position + 1
                return buffer[: end if self._strings.include else end - len(stop)]
        held = max(self._states.values(), default=0)
        final, self._held = buffer[: len(buffer) - held], buffer[len(buffer) - held :]
        return final

    def finish(self) -> str:
        """Return the text that was held back. No more text comes."""
        held, self._held = self._held, ""
        self._states.clear()
        return held

    def _advance(self, character: str) -> str | None:
        begun, begins = self._states, self._strings.by_first_character.get(character, ())
        if not (begun or begins):
            return None
        complete = ""
        stops, failures = self._strings.stops, self._strings.failures
        self._states = states = {}
        for i in {*begun, *begins}:
            stop, failure = stops[i], failures[i]
            state = begun.get(i, 0)
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                complete = max(complete, stop, key=len)
                state = failure[state - 1]
            if state:
                states[i] = state
        return complete or None


def _failure_function(stop: str) -> list[int]:
    """Return, for each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = failure[length - 1]
        if stop[i] == stop[length]:
            length += 1
        failure[i] = length
    return failure
