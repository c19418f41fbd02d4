"""Writes the blocks of sequences that end to the tiers that find blocks by their hashes (see ``HashedTier``)."""

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.tier import BlockCopy


class WriteBack(Feature):
    """Queues the blocks of sequences that end, and puts some of them into each plan."""

    def entered(self, request: Request) -> None:
        """See ``Feature``. If a tier has less of a prompt than was written to it, it has forgotten the rest."""
        kv, first = self.scheduler.kv, request.sequences[0]
        for tier in kv.hashed.values():
            if (num_found := request.stored.get(tier.identity)) is not None:
                root = kv.pool.tree.root_of(first.cache_salt)
                path = kv.pool.tree.walk(root, block_keys(first.token_bytes(), kv.block_size))
                tier.forgot(path[num_found:])

    def frees(self, sequence: RequestSequence) -> None:
        """See ``Feature``. The sequence's full blocks wait to be written."""
        if (last_node := sequence.table.last_node) is not None:
            for tier in self.scheduler.kv.hashed.values():
                tier.ended(last_node, sequence.request.stored.get(tier.identity, 0))

    def wants_step(self) -> bool:
        """See ``Feature``. Whether a block may be written now."""
        return any(tier.writes_back for tier in self.scheduler.kv.hashed.values())

    def planned(self, step: int) -> None:
        """See ``Feature``. The plan writes some of the blocks that wait."""
        copies: list[BlockCopy] = []
        for tier in self.scheduler.kv.hashed.values():
            tier.write_back(copies)
        self.scheduler.plan.copy(copies)
