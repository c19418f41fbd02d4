"""The identity of a host, and the network interface that has an address."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
import uuid
from pathlib import Path

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
