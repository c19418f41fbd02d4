"""Roles of snapshots of states: the classes of their life tables, behind the classes of blocks (see ``UseHistory``).

The class of a block says when its path is used again, but not at which of the snapshots on it. A snapshot at which the
next turn begins is used once, and the ones before it hardly ever again; a system prompt's is used often; and where the
next prompt never has the tokens of an answer, the ones behind answers are not used at all. So a *role* is the place
where a snapshot was taken with how the sequence that took it ended or, from the next sequence on its path on, with what
has become of it: all others went on from later ones, one has begun with it, or several have.
"""

from pagewise_scheduler.core.memory.eviction import NUM_BLOCK_CLASSES, NUM_ENDINGS

PROMPT, ANSWER, JUNCTION, INSIDE = range(4)
"""Near the end of a prompt, at the end of an answer, at a junction or a declared place, and elsewhere in a prompt."""
NUM_PLACES, _PER_PLACE = 4, 3
FIRST_KNOWN = NUM_BLOCK_CLASSES + NUM_PLACES * NUM_ENDINGS
"""The first role of snapshots of which it is known what has become of them."""
NUM_CLASSES = FIRST_KNOWN + NUM_PLACES * _PER_PLACE


def new_role(place: int) -> int:
    """The role of a snapshot that is taken at a place."""
    return NUM_BLOCK_CLASSES + place * NUM_ENDINGS


def place_of(role: int) -> int:
    """The place where the snapshots of a role are taken."""
    return (role - FIRST_KNOWN) // _PER_PLACE if role >= FIRST_KNOWN else (role - NUM_BLOCK_CLASSES) // NUM_ENDINGS


def role_at_end(role: int, ending: int) -> int:
    """The role of a snapshot when the sequence that took it has ended (see ``eviction.ending``)."""
    return role if role >= FIRST_KNOWN else role - (role - NUM_BLOCK_CLASSES) % NUM_ENDINGS + ending


def role_after(role: int, *, begun: bool) -> int:
    """The role of a snapshot when a later sequence on its path has ended, which has ``begun`` with it or not."""
    if role < FIRST_KNOWN:
        return FIRST_KNOWN + (role - NUM_BLOCK_CLASSES) // NUM_ENDINGS * _PER_PLACE + begun
    return role + (begun and (role - FIRST_KNOWN) % _PER_PLACE < _PER_PLACE - 1)
