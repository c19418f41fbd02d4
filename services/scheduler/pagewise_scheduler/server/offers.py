"""What executors offer when they join: everything an executor says of itself has a bound."""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec
from pagewise_shared.protocol import (
    DEVICE,
    HASH_TIERS,
    MAX_ADAPTERS,
    ROLES,
    TIER_NAMES,
    Hello,
    TierInfo,
    tier_name,
)
from pagewise_shared.protocol.limits import MAX_BATCHED_TOKENS, MAX_DEVICE_BLOCKS, MAX_RANKS, MAX_ROWS

from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.server.sessions import MAX_TEXT, text_flaw

MAX_EXECUTORS = 1024
"""Executors in a fleet."""
MAX_FLEET_BLOCKS = 1 << 25
"""Blocks of all executors, in all tiers: each costs the scheduler some 60 bytes."""

_TEXTS = (
    "executor_id", "model_fingerprint", "device", "dtype", "block_format", "kernels", "role", "no_grammars",
)  # fmt: skip
_MAX_ENDPOINTS = MAX_RANKS * MAX_TEXT
"""Characters of a block endpoint, which has one for each of an executor's ranks."""
_MAX_INT32 = (1 << 31) - 1
_FETCH_BYTES_PER_SECOND = 1e9
"""What fetching from a peer is taken to reach until it has been tried."""


_BOUNDS = {
    "block_size": (1, 1 << 16),
    "num_blocks": (1, MAX_DEVICE_BLOCKS),
    "max_model_len": (1, _MAX_INT32),
    "vocab_size": (1, _MAX_INT32),
    "max_num_seqs": (0, MAX_ROWS),
    "max_num_batched_tokens": (0, MAX_BATCHED_TOKENS),
    "bytes_per_block": (0, (1 << 63) - 1),
    "adapters.slots": (0, MAX_ADAPTERS),
    "adapters.max_rank": (0, 1 << 16),
    "max_grammars": (0, _MAX_INT32),
    "short_rope_len": (0, _MAX_INT32),
}
"""The least and the greatest value of the numbers in a Hello."""


def flaw_of_offer(hello: Hello) -> str | None:
    """What is wrong with the values of a Hello; None: nothing."""
    flaw = text_flaw(hello, _TEXTS, MAX_TEXT) or text_flaw(hello, ("block_endpoint",), _MAX_ENDPOINTS)
    if flaw is not None:
        return flaw
    if max(len(endpoint) for endpoint in hello.block_endpoint.split(" ")) > MAX_TEXT:
        return f"its block_endpoint has one that is longer than {MAX_TEXT} characters"
    for name, (least, most) in _BOUNDS.items():
        if not least <= (value := attrgetter(name)(hello)) <= most:
            return f"its {name} is {value}, which is not from {least} to {most}"
    if hello.role not in ROLES:
        return f"there is no role {hello.role!r}, only {', '.join(ROLES)}"
    if hello.costs is not None and not _are_times(msgspec.structs.astuple(hello.costs)):
        return "its measured costs are no times"
    return _flaw_of_tiers(hello.tiers)


def _flaw_of_tiers(tiers: Sequence[TierInfo]) -> str | None:
    nearest = DEVICE
    for tier in tiers:
        name = tier_name(tier.number)
        if not DEVICE < tier.number < len(TIER_NAMES):
            return f"nobody knows a tier {tier.number} below the device, only {', '.join(TIER_NAMES[1:])}"
        if tier.number <= nearest:
            return f"its tiers are not one below the other: {name} comes after {tier_name(nearest)}"
        if tier.number in HASH_TIERS and tier.num_blocks:
            return f"its tier {name} has {tier.num_blocks} blocks, but blocks have no ids there"
        if tier.number not in HASH_TIERS and not 1 <= tier.num_blocks <= MAX_FLEET_BLOCKS:
            return f"its tier {name} has {tier.num_blocks} blocks, which is not from 1 to {MAX_FLEET_BLOCKS}"
        if (flaw := text_flaw(tier, ("identity",), MAX_TEXT)) is not None:
            return f"of its tier {name}, {flaw}"
        if not _are_times(_measured(tier)):
            return f"its measured costs of copies to and from its tier {name} are no times"
        nearest = tier.number
    return None


def _measured(tier: TierInfo) -> tuple[float, ...]:
    return tier.load_setup, tier.load_block, tier.store_setup, tier.store_block


def _are_times(costs: Iterable[float]) -> bool:
    return all(math.isfinite(cost) and cost >= 0 for cost in costs)


def misfit(hello: Hello, others: list[Hello], fingerprint: str | None) -> str | None:
    """Why an executor cannot join ``others``; None: it can. ``fingerprint``: of the fleet's model, if it is known."""
    if len(others) >= MAX_EXECUTORS:
        return f"there are {MAX_EXECUTORS} executors already"
    blocks = sum(each.num_blocks + sum(tier.num_blocks for tier in each.tiers) for each in (hello, *others))
    if blocks > MAX_FLEET_BLOCKS:
        return f"the fleet would have {blocks} blocks, the most is {MAX_FLEET_BLOCKS}"
    # A fleet that is empty may come back with another model; a live one is of one model.
    if others and fingerprint != hello.model_fingerprint:
        return f"its model {hello.model_fingerprint} is not the fleet's model {fingerprint}"
    if any(other.vocab_size != hello.vocab_size for other in others):
        return f"its vocabulary of {hello.vocab_size} is not the fleet's"
    return None


def costs_of(hello: Hello) -> Costs:
    """What the executor has measured, in seconds, and what is believed of the rest."""
    tiers = copy_costs(hello.tiers)
    if hello.costs is None:
        return Costs(tiers=tiers)
    steps = {name: value * 1e-6 for name, value in msgspec.structs.asdict(hello.costs).items()}
    return Costs(**steps, tiers=tiers, fetch_block=hello.bytes_per_block / _FETCH_BYTES_PER_SECOND)


def sizes_of(hello: Hello) -> dict[int, int | str]:
    """Of each tier below the device, by its number, how many blocks it has, or its identity if they have no ids: a tier
    that does not say one is the executor's own."""
    return {
        tier.number: tier.num_blocks or tier.identity or f"{tier_name(tier.number)} of {hello.executor_id}"
        for tier in hello.tiers
    }


def copy_costs(tiers: Iterable[TierInfo]) -> dict[int, CopyCosts]:
    """What copies to and from tiers cost, in seconds, by their numbers, where that was measured."""
    return {
        tier.number: CopyCosts(*(value * 1e-6 for value in _measured(tier))) for tier in tiers if any(_measured(tier))
    }
