"""The tiers of KV memory: their numbers and names on the wire."""

DEVICE, HOST, DISK, REDIS = 0, 1, 2, 3
"""The numbers of the KV tiers, from the fastest to the slowest: blocks are demoted in this order."""
HASH_TIERS = (DISK, REDIS)
"""The tiers whose blocks have no ids and are found by their block hashes."""

TIER_NAMES = ("device", "host", "disk", "redis")
"""The names of the tiers, by number."""
POOL_TIERS = tuple(name for number, name in enumerate(TIER_NAMES) if number not in HASH_TIERS)
"""The names of the tiers whose blocks have ids."""
SOURCES = (*TIER_NAMES, "peer")
"""Where KV may come from: the executor's own tiers, or another executor."""
