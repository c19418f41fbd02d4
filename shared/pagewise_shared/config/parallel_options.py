"""The options of executors that are several processes, by vLLM's names; ``docs/operations.md`` tells of them."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from pagewise_shared.config.kinds import Port, Positive, described
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import printable
from pagewise_shared.protocol.limits import MAX_RANKS

TensorParallel = Annotated[
    int,
    Meta(ge=1, le=MAX_RANKS, extra={"short": "--tensor-parallel-size"}),
    described(
        "processes that hold a part of the model each and compute a step together, on a GPU each: an executor's ranks",
        "N",
        "`--tensor-parallel-size` is the same. `--kv-memory` is that of each rank, `--host-memory` that of all of them "
        "together ([operations.md](operations.md#a-model-larger-than-one-device)).",
    ),
]

Nnodes = Annotated[
    Positive,
    described(
        "nodes that the ranks of this executor are on; each of them runs pagewise-executor, with the same options",
        "N",
        "Each node has the same number of ranks ([operations.md](operations.md#ranks-on-several-hosts)).",
    ),
]
NodeRank = Annotated[
    int, Meta(ge=0), described("which of the --nnodes nodes this is; node 0 has rank 0, which the others join", "N")
]
MasterAddr = Annotated[
    str,
    described(
        "name or address of node 0, by which the other nodes reach it; without brackets and port",
        "HOST",
        "A name may not resolve yet, such as that of a pod that is about to start: every node tries again for ten "
        "minutes, and says so in its log at once and every 30 s, with the number of attempts.",
    ),
]
MasterPort = Annotated[
    Port,
    described(
        "port of node 0 on which it waits for the other nodes; 0 takes a free one",
        "PORT",
        "NCCL and gloo take further ports, which they choose themselves.",
    ),
]

_NOT_WITH_RANKS = {
    "simulate": (True, "--simulate: it runs no model"),
    "kv_mapping": ("mmu", "--kv-mapping mmu"),
}
_DEFAULTS = {"tensor_parallel": 1, "nnodes": 1, "node_rank": 0}


def check_parallel(values: Mapping[str, Any]) -> None:
    """Check the values of these options together.

    Raises:
        ConfigError: one does not work with several ranks; the text names it.
    """
    ranks, nodes, node = (values.get(name, least) for name, least in _DEFAULTS.items())
    if ranks % nodes:
        raise ConfigError(f"--nnodes {nodes} does not divide --tensor-parallel {ranks}: each node has as many ranks")
    if node >= nodes:
        raise ConfigError(f"--node-rank {node} is not below --nnodes {nodes}: nodes are numbered from 0")
    if (flaw := _flaw_of_host(host := values.get("master_addr", "127.0.0.1"))) is not None:
        raise ConfigError(f"--master-addr {printable(repr(host))} {flaw}")
    if node and values.get("master_port") == 0:
        raise ConfigError("--master-port 0 is for node 0, which takes a free port; others need the port that it took")
    if ranks == 1:
        return
    for name, (value, text) in _NOT_WITH_RANKS.items():
        if values.get(name) == value:
            raise ConfigError(f"--tensor-parallel {ranks} cannot be used with {text}")


_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)
_LONGEST_NAME = 253


def _flaw_of_host(host: str) -> str | None:
    """Return why this is neither the name nor the address of a host; None if it is one of them."""
    try:
        return "is no address of a host: others cannot reach it" if ipaddress.ip_address(host).is_unspecified else None
    except ValueError:
        pass
    if not host:
        return "is empty, and should be the name or the address of node 0"
    if host.startswith("["):
        return "has brackets: an address of IPv6 is given without them"
    if re.fullmatch(r"[^:/]+:\d+", host):
        return "has a port, which is given by --master-port"
    if re.fullmatch(r"[\d.]+", host):
        return "is no address of IPv4"
    if len(host) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split(".")):
        return "is neither the name nor the address of a host"
    return None
