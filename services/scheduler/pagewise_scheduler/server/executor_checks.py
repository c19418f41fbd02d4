"""The checks of executors' messages: an executor is trusted with its own requests, and with nothing else.

Every number and text in a message has a bound here. The core then relies on them, except that it checks itself whether
a result fits the step.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter, mul

import msgspec
from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.config.speculative import MAX_PROPOSED_TOKENS
from pagewise_shared.protocol import (
    DEVICE,
    HASH_TIERS,
    MAX_ADAPTERS,
    ROLES,
    TIER_NAMES,
    AdapterLoaded,
    Copied,
    Hello,
    LayerGroup,
    StepResult,
    TierInfo,
    TokenLogprobs,
    named_blocks,
    tier_name,
    unpack_float32s,
    unpack_int32s,
)
from pagewise_shared.protocol.limits import MAX_BATCHED_TOKENS, MAX_DEVICE_BLOCKS, MAX_RANKS, MAX_ROWS

from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.server.sessions import MAX_TEXT, ImpossibleError, text_error

MAX_EXECUTORS = 1024
"""Executors in a fleet."""
MAX_FLEET_BLOCKS = 1 << 25
"""Blocks of all executors, in all tiers: each costs the scheduler some 60 bytes."""

_TEXTS = (
    "executor_id", "model_fingerprint", "device", "dtype", "block_format", "kernels", "role", "no_grammars",
)  # fmt: skip
_MAX_ENDPOINTS = MAX_RANKS * MAX_TEXT
"""Characters of a block endpoint, which consists of one for each rank of an executor."""
_MAX_INT32 = (1 << 31) - 1
_MAX_ERROR_TEXT = 4096
_FETCH_BYTES_PER_SECOND = 1e9
"""The initial estimate of the rate at which blocks are fetched from a peer."""

_BOUNDS = {
    "block_size": (1, 1 << 16),
    "num_blocks": (1, MAX_DEVICE_BLOCKS),
    "max_model_len": (1, _MAX_INT32),
    "vocab_size": (1, _MAX_INT32),
    "max_num_seqs": (0, MAX_ROWS),
    "max_num_batched_tokens": (0, MAX_BATCHED_TOKENS),
    "bytes_per_block": (0, (1 << 63) - 1),
    "num_pages": (0, MAX_DEVICE_BLOCKS),
    "page_bytes": (0, (1 << 63) - 1),
    "adapters.slots": (0, MAX_ADAPTERS),
    "adapters.max_rank": (0, 1 << 16),
    "max_grammars": (0, _MAX_INT32),
    "short_rope_len": (0, _MAX_INT32),
    "max_proposed": (0, MAX_PROPOSED_TOKENS),
    "max_proposing": (0, _MAX_INT32),
}
"""The bounds of the numbers in a Hello."""


# ---- Hello -------------------------------------------------------------------------------------------


def hello_error(hello: Hello) -> str | None:
    """Return why the values of a Hello are not acceptable; None if they are."""
    error = text_error(hello, _TEXTS, MAX_TEXT) or text_error(hello, ("block_endpoint",), _MAX_ENDPOINTS)
    if error is not None:
        return error
    if max(len(endpoint) for endpoint in hello.block_endpoint.split(" ")) > MAX_TEXT:
        return f"its block_endpoint has one that is longer than {MAX_TEXT} characters"
    for name, (least, most) in _BOUNDS.items():
        if not least <= (value := attrgetter(name)(hello)) <= most:
            return f"its {name} is {value}, which is not from {least} to {most}"
    if hello.role not in ROLES:
        return f"there is no role {hello.role!r}, only {', '.join(ROLES)}"
    if hello.costs is not None and not _are_times(msgspec.structs.astuple(hello.costs)):
        return "its measured costs are no times"
    return _groups_error(hello) or _tiers_error(hello.tiers)


def _groups_error(hello: Hello) -> str | None:
    groups, pages = hello.groups, hello.num_pages
    if not groups:
        return f"it has {pages} pages, but no groups of layers" if pages else None
    if len(groups) == 1:
        return "it has one group of layers, which has blocks and no pages"
    if not pages:
        return f"it has {len(groups)} groups of layers, but no pages for their blocks"
    for number, group in enumerate(groups):
        name = f"its group {number} of layers"
        if not 1 <= group.num_layers <= _MAX_INT32 or not 1 <= group.pages_per_block <= pages:
            return f"{name} has {group.num_layers} layers, and blocks of {group.pages_per_block} of the {pages} pages"
        if (number > 0) != (0 < group.window <= _MAX_INT32) or group.window < 0 or (group.chunked and not number):
            kind = "chunks" if group.chunked else "a window"
            return f"{name} has {kind} of {group.window} tokens: the first group sees all tokens, and no other does"
        if group.state and (group.window != 2 or group.chunked):
            return f"{name} has states, and a window of {group.window} tokens, which is not 2"
    if hello.num_blocks != (blocks := pages // groups[0].pages_per_block):
        return f"it has {hello.num_blocks} blocks of its first group, but pages for {blocks}"
    if not hello.no_segments:
        return "it has several groups of layers and would move segments, which only layers that see all tokens have"
    return None


def shape_of(hello: Hello, most_tokens: int) -> ArenaShape | None:
    """Return the device memory of an executor whose layers have several groups; None: they have one.

    ``most_tokens``: of all steps in flight.
    """
    if not hello.groups:
        return None
    full, *windows = hello.groups
    shapes = tuple(WindowShape(one.window, one.pages_per_block, one.chunked, one.state) for one in windows)
    return ArenaShape(hello.num_pages, full.pages_per_block, shapes, most_tokens, full.latent)


def _tiers_error(tiers: Sequence[TierInfo]) -> str | None:
    nearest = DEVICE
    for tier in tiers:
        name = tier_name(tier.number)
        if not DEVICE < tier.number < len(TIER_NAMES):
            return f"there is no tier {tier.number} below the device, only {', '.join(TIER_NAMES[1:])}"
        if tier.number <= nearest:
            return f"its tiers are not one below the other: {name} comes after {tier_name(nearest)}"
        if tier.number in HASH_TIERS and tier.num_blocks:
            return f"its tier {name} has {tier.num_blocks} blocks, but blocks have no ids there"
        if tier.number not in HASH_TIERS and not 1 <= tier.num_blocks <= MAX_FLEET_BLOCKS:
            return f"its tier {name} has {tier.num_blocks} blocks, which is not from 1 to {MAX_FLEET_BLOCKS}"
        if (error := text_error(tier, ("identity", "dtype"), MAX_TEXT)) is not None:
            return f"of its tier {name}, {error}"
        if not 0 <= tier.block_bytes < 1 << 63:
            return f"of its tier {name}, a block of {tier.block_bytes} bytes is none"
        if not _are_times(_measured(tier)):
            return f"its measured costs of copies to and from its tier {name} are no times"
        nearest = tier.number
    return None


def _measured(tier: TierInfo) -> tuple[float, ...]:
    return tier.load_setup, tier.load_block, tier.store_setup, tier.store_block


def _are_times(costs: Iterable[float]) -> bool:
    return all(math.isfinite(cost) and cost >= 0 for cost in costs)


def incompatibility(hello: Hello, others: list[Hello], fingerprint: str | None) -> str | None:
    """Return why an executor cannot join ``others``; None if it can. ``fingerprint``: the fleet's, if known."""
    if len(others) >= MAX_EXECUTORS:
        return f"there are {MAX_EXECUTORS} executors already"
    blocks = sum(map(_num_blocks, (hello, *others)))
    if blocks > MAX_FLEET_BLOCKS:
        return f"the fleet would have {blocks} blocks, the most is {MAX_FLEET_BLOCKS}"
    # An empty fleet may come back with another model.
    if others and fingerprint != hello.model_fingerprint:
        return f"its model {hello.model_fingerprint} is not the fleet's model {fingerprint}"
    if any(other.vocab_size != hello.vocab_size for other in others):
        return f"its vocabulary of {hello.vocab_size} is not the fleet's"
    return None


def checked_inventory(hello: Hello) -> list[dict[int, dict[BlockHash, int]]]:
    """Return the block ids of a Hello's inventory by block hash, for each group of layers and each tier number.

    Raises:
        ProtocolError: the inventory names a group or a tier with ids that does not exist, a block that the group does
            not have there, or one twice; or an executor with several groups offers more pages than a tier has.
    """
    inventory, groups = hello.inventory, hello.groups or (LayerGroup(1, 1),)
    if inventory is None:
        return [{} for _ in groups]
    sizes = {DEVICE: hello.num_pages or hello.num_blocks, **{tier.number: tier.num_blocks for tier in hello.tiers}}
    if any(not (0 <= one.group < len(groups) and sizes.get(one.tier)) for one in inventory.tiers):
        raise ImpossibleError(f"an inventory of a tier, or of a group of {len(groups)}, that does not exist")
    found = [named_blocks(inventory, number) for number in range(len(groups))]
    num_offered = {(one.tier, one.group): len(one.blocks) // 4 for one in inventory.tiers}
    for tier, size in sizes.items():
        pages = 0
        for number, (group, by_tier) in enumerate(zip(groups, found, strict=True)):
            held, most = by_tier.get(tier, {}), size // group.pages_per_block
            # An executor with one group may offer a hash twice: one of the blocks is taken, the other counts as free.
            count = num_offered.get((tier, number), 0) if hello.groups else len(held)
            if len(set(held.values())) != count or any(not 0 <= block < most for block in held.values()):
                raise ImpossibleError(
                    f"{count} blocks of group {number} in {tier_name(tier)}, not {most} different ones"
                )
            pages += count * group.pages_per_block
        if pages > size:
            raise ImpossibleError(f"blocks of {pages} pages in {tier_name(tier)}, which has {size}")
    return found


def _num_blocks(hello: Hello) -> int:
    """The blocks of all tiers and groups."""
    windows = sum(hello.num_pages // group.pages_per_block for group in hello.groups[1:])
    return hello.num_blocks + windows + sum(tier.num_blocks for tier in hello.tiers)


def costs_of(hello: Hello) -> Costs:
    """Return the costs that the executor has measured, in seconds, and estimates of the rest."""
    tiers = copy_costs(hello.tiers, hello.groups[0].pages_per_block if hello.groups else 1)
    if hello.costs is None:
        return Costs(tiers=tiers)
    steps = {name: value * 1e-6 for name, value in msgspec.structs.asdict(hello.costs).items()}
    return Costs(**steps, tiers=tiers, fetch_block=hello.bytes_per_block / _FETCH_BYTES_PER_SECOND)


def sizes_of(hello: Hello) -> dict[int, int | str]:
    """Return the size of each tier below the device, by its number: its blocks, or the identity of a tier without block
    ids, which is unique to the executor if the Hello has none."""
    return {
        tier.number: tier.num_blocks or tier.identity or f"{tier_name(tier.number)} of {hello.executor_id}"
        for tier in hello.tiers
    }


def copy_costs(tiers: Iterable[TierInfo], pages_per_block: int = 1) -> dict[int, CopyCosts]:
    """Return the measured costs of copies of blocks to and from tiers, in seconds, by the tier's number."""
    units = 1e-6, 1e-6 * pages_per_block, 1e-6, 1e-6 * pages_per_block
    return {tier.number: CopyCosts(*map(mul, _measured(tier), units)) for tier in tiers if any(_measured(tier))}


# ---- results -----------------------------------------------------------------------------------------


def checked_tokens(result: StepResult, hello: Hello) -> list[int]:
    """Check a result of the executor that sent ``hello``, and return its tokens.

    Raises:
        ImpossibleError: a value is out of bounds.
    """
    if len(result.tokens) % 4:
        raise ImpossibleError(f"{len(result.tokens)} bytes of tokens")
    tokens = array("I", result.tokens).tolist()  # unsigned: a negative token becomes too large
    if tokens and max(tokens) >= hello.vocab_size:
        raise ImpossibleError(f"a token outside its vocabulary of {hello.vocab_size}")
    if result.proposed and not _are_drafts(result.proposed, hello.vocab_size):
        raise ImpossibleError("proposed tokens that are none")
    if not 0 <= result.elapsed_us <= _MAX_INT32:
        raise ImpossibleError(f"a step of {result.elapsed_us} µs")
    if result.failures or result.logprobs or result.prompt_logprobs:
        _check_rows(result, len(tokens), hello)
    return tokens


def _are_drafts(proposed: bytes, vocab_size: int) -> bool:
    """Whether they are tokens, or -1 where there is none."""
    if len(proposed) % 4:
        return False
    tokens = unpack_int32s(proposed)
    return min(tokens) >= -1 and max(tokens) < vocab_size


def _check_rows(result: StepResult, num_tokens: int, hello: Hello) -> None:
    indices = [failure.index for failure in result.failures]
    if not _ascend(indices, 0, num_tokens) or any(len(one.message) > _MAX_ERROR_TEXT for one in result.failures):
        raise ImpossibleError("failures of no token, or with a message that is too long")
    if not _are_logprobs(result.logprobs, 0, num_tokens, hello):
        raise ImpossibleError("log-probabilities of no token, or that are none")
    if not all(_are_logprobs(prompt.entries, 1, hello.max_model_len, hello) for prompt in result.prompt_logprobs):
        raise ImpossibleError("log-probabilities of no token of a prompt, or that are none")


def check_copies(copied: Copied) -> None:
    """Check a report of copies.

    Raises:
        ImpossibleError: a value is out of bounds.
    """
    if len(copied.bad) % 4:
        raise ImpossibleError(f"{len(copied.bad)} bytes of blocks")
    if not 0 <= copied.elapsed_us <= _MAX_INT32:
        raise ImpossibleError(f"copies of {copied.elapsed_us} µs")


def check_loaded(loaded: AdapterLoaded) -> None:
    """Check a report of a loaded adapter.

    Raises:
        ImpossibleError: a value is out of bounds.
    """
    if not 0 <= loaded.elapsed_us <= _MAX_INT32:
        raise ImpossibleError(f"an adapter that took {loaded.elapsed_us} µs")
    if any(len(content) != HASH_BYTES for content in loaded.evicted):
        raise ImpossibleError("the hash of an adapter that is none")


def _ascend(indices: list[int], first: int, end: int) -> bool:
    """Whether the indices lie in [first, end) and ascend strictly, so that there are never more than fit."""
    return not indices or (indices[0] >= first and indices[-1] < end and all(a < b for a, b in pairwise(indices)))


def _are_logprobs(entries: Sequence[TokenLogprobs], first: int, end: int, hello: Hello) -> bool:
    """Whether indices, tokens, ranks and log-probabilities are in bounds.

    The alternatives of all entries are checked together, because a step may have tens of thousands of them.
    """
    if not entries:
        return True
    indices, tokens, logprobs, ranks, top_ids, top_logprobs = map(
        list, zip(*map(msgspec.structs.astuple, entries), strict=True)
    )
    sizes = list(map(len, top_ids))
    if not _ascend(indices, first, end) or sizes != list(map(len, top_logprobs)) or any(size % 4 for size in sizes):
        return False
    tokens += unpack_int32s(b"".join(top_ids))
    logprobs += unpack_float32s(b"".join(top_logprobs))
    vocabulary = hello.vocab_size
    return (
        0 <= min(tokens) <= max(tokens) < vocabulary
        and max(sizes) <= 4 * vocabulary
        and 1 <= min(ranks) <= max(ranks) <= vocabulary
        # Rounding may exceed 0 by a little. ``max`` may pass over a NaN, a sum does not.
        and max(logprobs) < 1
        and not math.isnan(sum(logprobs))
    )
