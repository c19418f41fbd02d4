"""The identity of a host, its network interfaces, and the address of node 0 (``--master-addr``)."""

import contextlib
import fcntl
import ipaddress
import logging
import socket
import struct
import time
import uuid
from pathlib import Path

from pagewise_shared.logs import BoundedLog

from pagewise_executor.ranks.link import JOIN_SECONDS, SAY_SECONDS
from pagewise_executor.tiers.block_endpoint import address_towards, in_brackets

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
_SIOCGIFADDR = 0x8915
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Return a text that is the same for all processes that share this machine's memory, and differs between machines.

    The containers of one machine count as one host. The limits of a container are taken into account where memory is
    allocated.
    """
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {uuid.getnode():x}"


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this IP address, on Linux; None if none is known to have it.

    Of an interface's IPv4 addresses only the first is known. All of 127.0.0.0/8 belongs to the loopback interface.
    """
    wanted = ipaddress.ip_address(address)
    for _, name in socket.if_nameindex():
        if wanted in _addresses(name) or (wanted.is_loopback and name in ("lo", "lo0")):
            return name
    return None


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, device = line.split()
            if device == name:
                found.append(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found


def unresolved(master: str) -> str | None:
    """Return why the name in ``--master-addr`` does not resolve now; None if it resolves, or is an address."""
    try:
        socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"--master-addr {master} does not resolve: {error.strerror or error}"
    return None


def own_address(master: str, seconds: float = JOIN_SECONDS) -> str:
    """Return the address on which node 0 listens.

    It is the address of ``--master-addr`` if this host has that address. Otherwise, as behind network address
    translation, it is this host's address towards it. A name that does not resolve yet is retried for ``seconds``,
    because an orchestrator may publish the name of a process after it has started the process.

    Raises:
        TimeoutError: the name has not resolved.
    """
    deadline = time.monotonic() + seconds
    complaints = BoundedLog(log, burst=1, seconds=SAY_SECONDS)
    attempts = 0
    while (reason := unresolved(master)) is not None:
        attempts += 1
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{reason} (after {attempts} attempts in {seconds:g} s)")
        complaints.warning("%s; trying again for up to %d s (attempt %d)", reason, left, attempts)
        time.sleep(min(left, _PAUSE_SECONDS))
    with contextlib.suppress(OSError):
        family, kind, _, _, (address, *_) = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((address, 0))
            return str(address)
    return address_towards(f"tcp://{in_brackets(master)}:1")
