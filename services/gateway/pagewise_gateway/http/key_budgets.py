"""Budgets of memory in the lines of API keys: ``memory.min``, ``memory.low`` and ``memory.high``, by tier."""

from collections.abc import Iterable, Mapping
from math import fsum

from pagewise_shared.config.checks import parse_size
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import DISK, POOL_TIERS, REDIS, TIER_NAMES, MemoryBudget, MemorySize

BOUNDS = ("min", "low", "high")
_FORM = (r"(?i:0|[0-9]{1,16}(\.[0-9]+)?(%|[KMGT]i?B|B)?)", "a size such as 2GiB, or a share of the tier such as 10%")
_OF_STORES = f"memory.{TIER_NAMES[REDIS]}.", "memory.store."
_NAMES = {
    "memory." + ("" if tier == TIER_NAMES[0] else f"{tier}.") + bound: (TIER_NAMES.index(tier), bound)
    for tier in (*POOL_TIERS, TIER_NAMES[DISK])
    for bound in BOUNDS
}
"""The name of each bound in a line -> the number of its tier, and the bound."""
RIGHTS = dict.fromkeys(_NAMES, _FORM)
"""The name of each bound -> the pattern of its value, and the value in words."""
_MOST_BYTES = 2**50
_MOST_SHARE = 0.5
"""The share of a tier that the minima of all keys may take together."""


def check_tier(name: str, where: str) -> None:
    """Check that an unknown name is not a bound of a tier without budgets.

    Raises:
        ConfigError: the name is such a bound.
    """
    if name.startswith(_OF_STORES):
        raise ConfigError(
            f"{where}: {name}: only the device (memory.min), host memory (memory.host.min) and disk caches "
            "(memory.disk.min) have budgets, because a store evicts blocks by itself"
        )


def budgets_of(given: Mapping[str, str], where: str) -> tuple[MemoryBudget, ...]:
    """Return the budgets of a line. ``given``: the values of its bounds by name, in the form of ``RIGHTS``.

    Raises:
        ConfigError: a share is above 100%, a size is impossible, or a bound is above ``high``.
    """
    by_tier: dict[int, dict[str, MemorySize]] = {}
    for name, value in given.items():
        tier, bound = _NAMES[name]
        by_tier.setdefault(tier, {})[bound] = _size_of(name, value, where)
    for sizes in by_tier.values():
        if (high := sizes.get("high")) is None:
            continue
        for bound, size in sizes.items():  # a size and a share are not comparable here
            comparable = bool(size.share) == bool(high.share) or high == MemorySize()
            if comparable and (size.bytes, size.share) > (high.bytes, high.share):
                raise ConfigError(f"{where}: {bound} of the memory is more than high")
    return tuple(MemoryBudget(tier, **sizes) for tier, sizes in sorted(by_tier.items()))


def _size_of(name: str, value: str, where: str) -> MemorySize:
    if value.endswith("%"):
        share = float(value[:-1]) / 100
        if share > 1:
            raise ConfigError(f"{where}: {name} is more than 100%")
        return MemorySize(share=share)
    size = 0 if float(value.rstrip("kKmMgGtTiIbB")) == 0 else parse_size(value)
    if size > _MOST_BYTES:
        raise ConfigError(f"{where}: {name} is more than {_MOST_BYTES // 2**40}TiB")
    return MemorySize(size)


def budgets_by_owner(
    clients: Iterable[tuple[str, str, tuple[MemoryBudget, ...]]], source: str
) -> dict[str, tuple[MemoryBudget, ...]]:
    """Return the budgets of each owner of cached KV with budgets.

    ``clients``: for each API key, its name, its owner (the name, or its group), and the budgets in its line.

    Raises:
        ConfigError: two names of a group have budgets, or the minima of all owners together are too large.
    """
    found: dict[str, tuple[MemoryBudget, ...]] = {}
    set_by: dict[str, str] = {}
    for name, owner, budgets in clients:
        if not budgets:
            continue
        if owner in found:
            raise ConfigError(
                f"{source}: the budgets of memory of {owner} are in the lines of {set_by[owner]} and {name}"
            )
        found[owner], set_by[owner] = budgets, name
    for number, tier in enumerate(TIER_NAMES):
        total = fsum(one.min.share for budgets in found.values() for one in budgets if one.tier == number)
        if total > _MOST_SHARE:
            raise ConfigError(
                f"{source}: the minima of memory on the {tier} are {total:.0%} together, at most {_MOST_SHARE:.0%} may "
                "be promised"
            )
    return found
