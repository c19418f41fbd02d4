"""Checks of the values of several options together, and the sizes that options take."""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from pagewise_shared.config.adapter_options import check_adapters
from pagewise_shared.config.kv_events import check_kv_events
from pagewise_shared.config.options import MAX_BODY_BYTES, MAX_BODY_MEMORY
from pagewise_shared.config.sampling_defaults import check_sampling_defaults
from pagewise_shared.config.speculative import check_speculative
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import printable

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def check(values: dict[str, Any], *, loads_adapters: bool) -> None:
    """Check the values of options together. ``loads_adapters``: the command has ``--enable-lora``.

    Raises:
        ConfigError: they contradict each other; the text names an option.
    """
    for check_some in _CHECKS:
        check_some(values)
    check_adapters(values, loads=loads_adapters)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``4GiB``, ``500MB`` or ``1073741824``.

    Raises:
        ConfigError: the text is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] == "I" or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2]])


def size_text(size: int) -> str:
    """Return ``size`` bytes as ``parse_size`` reads them, rounded up to three digits or so."""
    unit = next((unit for unit in ("GI", "MI") if size >= 10 * _UNITS[unit]), "KI")
    return f"{-(-size // _UNITS[unit])}{unit[0]}iB"


def _check_step(values: dict[str, Any]) -> None:
    rows, tokens = values.get("max_num_seqs"), values.get("max_num_batched_tokens")
    if rows is not None and tokens is not None and rows > tokens:
        raise ConfigError(
            f"--max-num-seqs {rows} is more than --max-num-batched-tokens {tokens}: each sequence that runs needs a "
            "token of every step"
        )


def _check_pool(values: dict[str, Any]) -> None:
    given = [name for name in ("num_blocks", "kv_memory", "gpu_memory_utilization") if values.get(name) is not None]
    if len(given) > 1:
        first, second = ("--" + name.replace("_", "-") for name in given[:2])
        raise ConfigError(f"{first} and {second} both set the size of the KV pool: give one")
    kv_dtype, tier_dtype = (values.get(name, "auto") for name in ("kv_dtype", "tier_dtype"))
    if "auto" not in (kv_dtype, tier_dtype):
        raise ConfigError(
            f"--tier-dtype {tier_dtype}: --kv-dtype {kv_dtype} has made KV smaller already, and copies of it stay so"
        )


_NOT_WITH_RANKS = {
    "simulate": (True, "--simulate: it runs no model"),
    "kv_mapping": ("mmu", "--kv-mapping mmu"),
}
_DEFAULTS = {"tensor_parallel": 1, "nnodes": 1, "node_rank": 0}


def _check_parallel(values: Mapping[str, Any]) -> None:
    ranks, nodes, node = (values.get(name, least) for name, least in _DEFAULTS.items())
    if ranks % nodes:
        raise ConfigError(f"--nnodes {nodes} does not divide --tensor-parallel {ranks}: each node has as many ranks")
    if node >= nodes:
        raise ConfigError(f"--node-rank {node} is not below --nnodes {nodes}: nodes are numbered from 0")
    if (error := _host_error(host := values.get("master_addr", "127.0.0.1"))) is not None:
        raise ConfigError(f"--master-addr {printable(repr(host))} {error}")
    if node and values.get("master_port") == 0:
        raise ConfigError("--master-port 0 is for node 0, which takes a free port; others need the port that it took")
    if ranks == 1:
        return
    for name, (value, text) in _NOT_WITH_RANKS.items():
        if values.get(name) == value:
            raise ConfigError(f"--tensor-parallel {ranks} cannot be used with {text}")


def _check_quantization(values: Mapping[str, Any]) -> None:
    if values.get("quantization_text") is not None and values.get("quantization") != "int4":
        raise ConfigError("--quantization-text is for --quantization int4")
    if values.get("quantization_text") is not None and (ranks := values.get("tensor_parallel", 1)) > 1:
        raise ConfigError(f"--tensor-parallel {ranks} cannot be used with --quantization-text")


_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)
_LONGEST_NAME = 253


def _host_error(host: str) -> str | None:
    """Return why ``host`` is not the name or address of a host; None: it is."""
    try:
        unreachable = ipaddress.ip_address(host).is_unspecified
        return "is not the address of a host: other nodes cannot reach it" if unreachable else None
    except ValueError:
        pass
    if not host:
        return "is empty, and should be the name or the address of node 0"
    if host.startswith("["):
        return "has brackets: write an IPv6 address without them"
    if re.fullmatch(r"[^:/]+:\d+", host):
        return "has a port: --master-port sets it"
    if re.fullmatch(r"[\d.]+", host):
        return "is not an IPv4 address"
    if len(host) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split(".")):
        return "is neither the name nor the address of a host"
    return None


def _check_tracing(values: dict[str, object]) -> None:
    endpoint = values.get("otlp_traces_endpoint")
    if endpoint is None:
        return
    try:
        parts = urlsplit(str(endpoint))
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for example a port that is not a number
        usable = False
    if not usable:
        raise ConfigError(
            f"--otlp-traces-endpoint: {endpoint!r} is not a URL such as http://collector:4318 (OTLP by HTTP, not gRPC)"
        )


def _check_sizes(values: Mapping[str, Any]) -> None:
    for name in ("kv_memory", "host_memory", "host_bandwidth", "disk_memory"):
        if values.get(name) is not None:
            parse_size(values[name])


def _check_role(values: Mapping[str, Any]) -> None:
    role = values.get("role", "both")
    if role != "both" and values.get("lend_blocks") is False:
        raise ConfigError(f"--role {role} needs --lend-blocks: requests move, and their blocks are fetched")


def _check_bodies(values: Mapping[str, Any]) -> None:
    if values.get("max_body_bytes", MAX_BODY_BYTES) > values.get("max_body_memory", MAX_BODY_MEMORY):
        raise ConfigError("--max-body-bytes is more than --max-body-memory: no body of that size could be read")


_CHECKS: tuple[Callable[[dict[str, Any]], None], ...] = (
    _check_pool,
    _check_step,
    _check_sizes,
    _check_parallel,
    _check_quantization,
    _check_tracing,
    check_speculative,
    check_sampling_defaults,
    check_kv_events,
    _check_role,
    _check_bodies,
)
