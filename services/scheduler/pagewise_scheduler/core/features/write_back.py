"""Writes the blocks of sequences that end back to hashed tiers, such as storage (see ``HashedTier``)."""

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.tier import BlockCopy


class WriteBack(Feature):
    """Queues the full blocks of sequences that end, and puts some of them into each plan."""

    def entered(self, request: Request) -> None:
        # If a tier has fewer blocks of a prompt than were written to it, it has evicted the rest.
        kv, first = self.scheduler.kv, request.sequences[0]
        for tier in kv.hashed.values():
            if (num_found := request.stored.get(tier.identity)) is not None:
                root = kv.pool.tree.root_of(first.cache_salt)
                path = kv.pool.tree.walk(root, block_keys(first.token_bytes(), kv.block_size))
                tier.forgot(path[num_found:])

    def frees(self, sequence: RequestSequence) -> None:
        if (last_node := sequence.table.last_node) is not None:
            for tier in self.scheduler.kv.hashed.values():
                tier.ended(last_node, sequence.request.stored.get(tier.identity, 0))

    def wants_step(self) -> bool:
        # Deletions in storage wait for copies that have been decided, and a request may have gone before the step that
        # would have taken the copies along.
        left = self.scheduler.has_unsent_demotions and self.scheduler.newest_in_flight is None
        return left or any(tier.writes_back for tier in self.scheduler.kv.hashed.values())

    def planned(self, step: int) -> None:
        copies: list[BlockCopy] = []
        for tier in self.scheduler.kv.hashed.values():
            tier.write_back(copies)
        self.scheduler.plan.copy(copies)
