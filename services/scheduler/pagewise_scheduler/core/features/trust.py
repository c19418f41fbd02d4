"""How far hints of an API key are believed, by what came of earlier ones.

A life table of each key's own hints (see ``predicted_uses``) corrects hints that are early or late as a rule. It cannot
tell single lies from single truths, so a key could get memory for one session by telling the truth about others. What
its broken hints have claimed is therefore charged to all its hints: their values are multiplied by its ``share``. Hints
count by the blocks that they are about, because that is what they claim.
"""

from dataclasses import dataclass

_FREE, _MOST_COUNTED = 4, 64


@dataclass(slots=True)
class Trust:
    """The hints of one API key that were judged: their number, their blocks, and the blocks of those that were kept.
    Old ones weigh less."""

    number: float = 0.0
    blocks: float = 0.0
    kept: float = 0.0

    @property
    def share(self) -> float:
        """The factor on the values of predictions from its hints, more than 0 and at most 1.

        It is 1 as long as, weighted by blocks, at most half of the hints were broken, four of which do not count.
        """
        if not self.blocks:
            return 1.0
        return min(1.0, 2 * (self.number * self.kept / self.blocks + _FREE) / (self.number + _FREE))

    def count(self, num_blocks: int, *, kept: bool) -> None:
        """Count a hint about so many blocks."""
        if self.number >= _MOST_COUNTED:
            self.number, self.blocks, self.kept = self.number / 2, self.blocks / 2, self.kept / 2
        self.number += 1
        self.blocks += num_blocks
        self.kept += num_blocks * kept
