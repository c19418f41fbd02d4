"""What executors hold for others: blocks that they let others fetch, and blocks from before that they offer."""

import logging

from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import named_blocks, tier_name

from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)


class CacheSharing:
    """The fleet's directory of prefixes, kept while executors come and go."""

    def __init__(self, metrics: Metrics) -> None:
        self.directory = PrefixDirectory()
        self._metrics = metrics

    def restore(self, engine: Engine) -> bool:
        """Expect what the executor holds from before; False: it holds nothing that could be used."""
        hello, scheduler = engine.hello, engine.scheduler
        if hello.inventory is None:
            return False
        try:
            scheduler.kv.expect(named_blocks(hello.inventory))
        except (ValueError, ProtocolError) as error:
            self._metrics.frames_dropped("bad_inventory").inc()
            log.warning("executor %s offers blocks that cannot be: %s", hello.executor_id, error)
            return False
        held = {tier_name(tier.number): len(tier.restorable) for tier in scheduler.kv.tiers.values()}
        log.info("%s holds blocks: %s", hello.executor_id, held)
        return True

    def begin(self, engine: Engine, key: str) -> None:
        """Let others fetch blocks from this executor, and it from them. ``key``: its public key."""
        hello, scheduler = engine.hello, engine.scheduler
        endpoint = hello.block_endpoint
        if not endpoint or endpoint in self.directory.peers:
            return
        block_format = (hello.block_format, hello.block_size, hello.bytes_per_block)
        # When others give its blocks back there may be room again for what it could not plan.
        scheduler.recoveries.join(self.directory, Peer(endpoint, block_format, scheduler, engine.touch, key))

    def end(self, engine: Engine) -> str | None:
        """Nobody fetches from this executor any more; returns the endpoint that its blocks were fetched from, if any:
        those who wait for some have to be told."""
        endpoint, peers = engine.scheduler.recoveries.endpoint, self.directory.peers
        if (peer := peers.get(endpoint)) is None or peer.scheduler is not engine.scheduler:
            return None
        del peers[endpoint]
        return endpoint
