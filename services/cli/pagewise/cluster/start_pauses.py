"""When processes of a kind are started again after some have died before they said a word. Pure: no Ray, no clock."""

from pagewise.cluster.reconcile import Kind

_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0
_USUAL = 2
"""So many deaths in a row may come of a node that goes."""


class StartPauses:
    """Pauses by kind, each twice as long as the one before.

    An actor dies before it has answered if Pagewise is missing on its node, or of another version, or if the node dies.
    """

    def __init__(self) -> None:
        self._deaths: dict[Kind, int] = {}
        self._until: dict[Kind, float] = {}

    def died(self, kind: Kind, now: float) -> float:
        """Note that one of this kind has died unheard; returns the seconds until the next one may be started."""
        deaths = self._deaths[kind] = self._deaths.get(kind, 0) + 1
        pause = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** min(deaths - 1, 10))
        self._until[kind] = now + pause
        return pause

    def answered(self, kind: Kind) -> None:
        """Note that a new one of this kind has answered."""
        self._deaths.pop(kind, None)
        self._until.pop(kind, None)

    def may_start(self, kind: Kind, now: float) -> bool:
        """Whether one may be started now."""
        return now >= self._until.get(kind, now)

    def failing(self) -> list[Kind]:
        """Return the kinds of which too many have died in a row."""
        return [kind for kind, deaths in self._deaths.items() if deaths > _USUAL]
