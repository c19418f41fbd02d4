"""What executors hold for others: blocks that they lend, and blocks from before that they offer."""

import logging
from collections.abc import Iterable

from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import TIER_NAMES, Hello, named_blocks

from pagewise_scheduler.actors.engine import Engine, GivenBack, PeerLost
from pagewise_scheduler.core.recovery.remote_tier import Peer, PrefixDirectory
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)


class Lending:
    """The directory of a fleet, kept while executors come and go."""

    def __init__(self, metrics: Metrics) -> None:
        self.directory = PrefixDirectory()
        self._metrics = metrics

    def take_over(self, hello: Hello, scheduler: Scheduler) -> bool:
        """Expect what the executor holds from before; False: it holds nothing that could be used."""
        if hello.inventory is None:
            return False
        try:
            scheduler.kv.expect(named_blocks(hello.inventory))
        except (ValueError, ProtocolError) as error:
            self._metrics.frames_dropped("bad_inventory").inc()
            log.warning("executor %s offers blocks that cannot be: %s", hello.executor_id, error)
            return False
        held = {TIER_NAMES[tier.number]: len(tier.restorable) for tier in scheduler.kv.tiers.values()}
        log.info("%s holds blocks: %s", hello.executor_id, held)
        return True

    def begin(self, hello: Hello, engine: Engine, key: str) -> None:
        """Let others fetch blocks from this executor, and it from them."""
        endpoint, scheduler = hello.block_endpoint, engine.scheduler
        if not endpoint or endpoint in self.directory.peers:
            return
        block_format = (hello.block_format, hello.block_size, hello.bytes_per_block)
        own = Peer(endpoint, block_format, scheduler, lambda: engine.tell(GivenBack()), key)
        scheduler.recoveries.join(self.directory, own)

    def end(self, engine: Engine, others: Iterable[Engine]) -> None:
        """Nobody fetches from this executor any more."""
        endpoint, peers = engine.scheduler.recoveries.endpoint, self.directory.peers
        if (peer := peers.get(endpoint)) is not None and peer.scheduler is engine.scheduler:
            del peers[endpoint]
            for other in others:
                if other is not engine:
                    other.tell(PeerLost(endpoint))
