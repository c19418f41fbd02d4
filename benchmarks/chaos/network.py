"""A network namespace that executors run in, whose packets can be dropped.

By iptables, nft, or netem of tc, whichever this machine has. Where it has none of them, packets are sent to a hardware
address that no device has: all of them or none.
"""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

_SUBNET = "10.213.{}"
_NOBODY = "02:00:00:00:00:01"

Command = tuple[str, ...]


class Cable(NamedTuple):
    """A virtual cable between the host and a namespace: its two ends, and their addresses.

    ``inside``: the words in front of a command that is to run in the namespace.
    """

    here: str
    there: str
    host: str
    guest: str
    inside: Command


class Dropper(NamedTuple):
    """A way to drop packets. ``lossy``: it can drop a share of them. Both functions give the commands to run."""

    tool: str
    lossy: bool
    drop: Callable[[Cable, float], list[Command]]
    heal: Callable[[Cable], list[Command]]


def _iptables_drop(cable: Cable, share: float) -> list[Command]:
    match = () if share >= 1 else ("-m", "statistic", "--mode", "random", "--probability", f"{share}")
    return [(*cable.inside, "iptables", "-A", chain, *match, "-j", "DROP") for chain in ("INPUT", "OUTPUT")]


def _iptables_heal(cable: Cable) -> list[Command]:
    return [(*cable.inside, "iptables", "-F")]


def _nft_drop(cable: Cable, share: float) -> list[Command]:
    match = "" if share >= 1 else f"numgen random mod 100 < {round(100 * share)} "
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; {match}drop; }}; " for hook in ("input", "output")
    )
    return [(*cable.inside, "nft", f"table inet pagewise {{ {chains}}}")]


def _nft_heal(cable: Cable) -> list[Command]:
    return [(*cable.inside, "nft", "add table inet pagewise; delete table inet pagewise")]


def _netem_drop(cable: Cable, share: float) -> list[Command]:
    rule = ("root", "netem", "loss", f"{100 * min(1.0, share):g}%")
    return [
        ("tc", "qdisc", "replace", "dev", cable.here, *rule),
        (*cable.inside, "tc", "qdisc", "replace", "dev", cable.there, *rule),
    ]


def _netem_heal(cable: Cable) -> list[Command]:
    return [
        ("tc", "qdisc", "replace", "dev", cable.here, "root", "pfifo"),
        (*cable.inside, "tc", "qdisc", "replace", "dev", cable.there, "root", "pfifo"),
    ]


def _neighbours_drop(cable: Cable, share: float) -> list[Command]:
    return [
        (*run, "ip", "neigh", "replace", address, "lladdr", _NOBODY, "dev", device, "nud", "permanent")
        for run, address, device in _neighbours(cable)
    ]


def _neighbours_heal(cable: Cable) -> list[Command]:
    # An entry that may be missing cannot be deleted; flushing works with and without it.
    return [(*run, "ip", "neigh", "flush", "nud", "all", "dev", device) for run, _, device in _neighbours(cable)]


def _neighbours(cable: Cable) -> list[tuple[Command, str, str]]:
    return [((), cable.guest, cable.here), (cable.inside, cable.host, cable.there)]


_DROPPERS = (
    Dropper("iptables", True, _iptables_drop, _iptables_heal),
    Dropper("nft", True, _nft_drop, _nft_heal),
    Dropper("tc", True, _netem_drop, _netem_heal),
    Dropper("ip", False, _neighbours_drop, _neighbours_heal),
)


class Namespace:
    """One namespace behind a virtual cable. ``host``: the address of this side of it."""

    def __init__(self, number: int) -> None:
        tag = f"pw{os.getpid() % 100_000}"
        subnet = _free_subnet()
        self.name, self.host = f"{tag}-{number}", f"{subnet}.1"
        self.prefix = ("ip", "netns", "exec", self.name)
        cable = self._cable = Cable(f"{tag}h{number}", f"{tag}n{number}", self.host, f"{subnet}.2", self.prefix)
        _run("ip", "netns", "add", self.name)
        try:
            _run("ip", "link", "add", cable.here, "type", "veth", "peer", "name", cable.there, "netns", self.name)
            _run("ip", "addr", "add", f"{cable.host}/24", "dev", cable.here)
            _run("ip", "link", "set", cable.here, "up")
            _run(*self.prefix, "ip", "addr", "add", f"{cable.guest}/24", "dev", cable.there)
            _run(*self.prefix, "ip", "link", "set", cable.there, "up")
            _run(*self.prefix, "ip", "link", "set", "lo", "up")
            self._dropper = self._find_dropper()
        except BaseException:
            self.close()
            raise

    @property
    def lossy(self) -> bool:
        """Whether a share of the packets can be dropped, not only all of them."""
        return self._dropper.lossy

    @property
    def dropped_by(self) -> str:
        """The tool that drops packets."""
        return self._dropper.tool

    def drop(self, share: float) -> None:
        """Drop this share of the packets in both directions; 1: all of them."""
        self.heal()
        for command in self._dropper.drop(self._cable, share):
            _run(*command)

    def heal(self) -> None:
        """Let every packet through again."""
        for command in self._dropper.heal(self._cable):
            _run(*command)

    def close(self) -> None:
        """Remove the cable and the namespace."""
        for command in (("ip", "link", "del", self._cable.here), ("ip", "netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                _run(*command)

    def _find_dropper(self) -> Dropper:
        """The first that works here: a kernel may know less than a tool.

        Raises:
            CalledProcessError: none does.
        """
        for dropper in _DROPPERS:
            if shutil.which(dropper.tool) is None:
                continue
            self._dropper = dropper
            try:
                self.drop(0.5 if dropper.lossy else 1.0)
                self.heal()
            except subprocess.CalledProcessError:
                if dropper is _DROPPERS[-1]:
                    raise
            else:
                return dropper
        raise AssertionError("the last one is a tool that has been used before")


@contextlib.contextmanager
def namespace(number: int = 1) -> Iterator[Namespace | str]:
    """A namespace, or why this machine does not allow one."""
    if shutil.which("ip") is None:
        yield "there is no ip on this machine"
        return
    try:
        made = Namespace(number)
    except subprocess.CalledProcessError as error:
        yield f"{' '.join(error.cmd)}: {error.stderr.strip()}"
        return
    try:
        yield made
    finally:
        made.close()


def _free_subnet() -> str:
    """One that no interface has: with two of them the answers of a second run would leave by the cable of the first."""
    taken = _run("ip", "-4", "-o", "addr")
    return random.choice([one for third in range(256) if f"{(one := _SUBNET.format(third))}." not in taken])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
