"""The links of one executor, as consoles show them."""

from collections.abc import Mapping

from pagewise_shared.protocol import tier_name

from pagewise_scheduler.core.console.reports import LinkState
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Link


def link_states(scheduler: Scheduler, names: Mapping[str, str]) -> list[LinkState]:
    """Return the links from which an executor gets blocks. ``names``: the executors by their block endpoints; links to
    others are left out."""
    costs = scheduler.costs
    tiers = [_link(link.load, tier=tier_name(number)) for number, link in costs.tiers.items()]
    return tiers + [_link(link, peer=names[peer]) for peer, link in costs.peers.items() if peer in names]


def _link(link: Link, *, tier: str | None = None, peer: str | None = None) -> LinkState:
    setup, block = (round(1e6 * constant, 1) for constant in link.constants)
    return LinkState(setup, block, round(link.error, 4), link.num_loading, tier, peer)
