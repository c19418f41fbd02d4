"""How likely sequences begin at a snapshot, by its role: why it was taken, and what has become of it since.

The class of a block says when its path is used again (see ``UseHistory``), but not at which of the snapshots on the
path. So the uses of the snapshots of each role are counted, and beside them the uses that the classes of their blocks
let expect for as long as they were kept. The ratio of both is a role's *share* of the uses of a path, as actuaries
compare the mortality of a group with that of a standard life table. It does not depend on how long snapshots stay,
so a role whose snapshots are evicted early is not taken for one without uses.
"""

from enum import IntEnum


class Place(IntEnum):
    """Why a snapshot was taken: at the end of a prompt or an answer; where a prompt left another one in its inside, or
    near its end; inside of a prompt."""

    PROMPT = 0
    ANSWER = 1
    JUNCTION = 2
    LEFT = 3
    INSIDE = 4


_MOST_USES = 2
NUM_ROLES = len(Place) * 2 * (_MOST_USES + 1)

_INSIDE, _FOLLOWED = 0.1, 0.3
"""The share of the inside of prompts, and of snapshots with later ones behind them, compared with that of others, until
more is known."""
_WEIGHT = 2.0
"""The expected uses that what is assumed at first weighs as much as."""
_MOST_EXPECTED = 200.0
"""Expected uses of a role at which its counts are halved."""


def role(place: Place, num_uses: int, *, followed: bool) -> int:
    """The role of a snapshot at which ``num_uses`` sequences have begun; ``followed``: there are later ones on its
    path, at which most of those begin that come back."""
    return (place * 2 + followed) * (_MOST_USES + 1) + min(num_uses, _MOST_USES)


class RoleHistory:
    """Uses of snapshots by role, and the uses that were expected."""

    def __init__(self) -> None:
        self._priors = [
            (_INSIDE if number // (2 * (_MOST_USES + 1)) == Place.INSIDE else 1.0)
            * (_FOLLOWED if number // (_MOST_USES + 1) % 2 else 1.0)
            for number in range(NUM_ROLES)
        ]
        self._uses, self._expected = [0.0] * NUM_ROLES, [0.0] * NUM_ROLES

    def share(self, number: int) -> float:
        """How often snapshots of a role are used, compared with what the classes of their blocks let expect."""
        return (self._uses[number] + _WEIGHT * self._priors[number]) / (self._expected[number] + _WEIGHT)

    def used(self, number: int) -> None:
        """A sequence has begun at a snapshot of a role."""
        self._uses[number] += 1.0

    def kept(self, number: int, expected: float) -> None:
        """A snapshot of a role was kept for so long that the class of its block lets expect so many uses."""
        self._expected[number] += expected
        if self._expected[number] > _MOST_EXPECTED:
            self._uses[number] /= 2
            self._expected[number] /= 2
