"""A network namespace that executors run in, whose packets can be dropped."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator

_SUBNET = "10.213.{}"


class Namespace:
    """One namespace behind a virtual cable. ``host``: the address of this side of it."""

    def __init__(self, number: int) -> None:
        tag = f"pw{os.getpid() % 100_000}"
        subnet = _free_subnet()
        self.name, self.host = f"{tag}-{number}", f"{subnet}.1"
        self.prefix = ("ip", "netns", "exec", self.name)
        here, there = self._cable = f"{tag}h{number}", f"{tag}n{number}"
        _run("ip", "netns", "add", self.name)
        try:
            _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", self.name)
            _run("ip", "addr", "add", f"{self.host}/24", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run(*self.prefix, "ip", "addr", "add", f"{subnet}.2/24", "dev", there)
            _run(*self.prefix, "ip", "link", "set", there, "up")
            _run(*self.prefix, "ip", "link", "set", "lo", "up")
            self.drop(0.5)
            self.heal()
        except BaseException:
            self.close()
            raise

    def drop(self, share: float) -> None:
        """Drop this share of the packets in both directions; 1: all of them."""
        self.heal()
        match = () if share >= 1 else ("-m", "statistic", "--mode", "random", "--probability", f"{share}")
        for chain in ("INPUT", "OUTPUT"):
            _run(*self.prefix, "iptables", "-A", chain, *match, "-j", "DROP")

    def heal(self) -> None:
        """Let every packet through again."""
        _run(*self.prefix, "iptables", "-F")

    def close(self) -> None:
        """Take the cable and the namespace away."""
        for command in (("ip", "link", "del", self._cable[0]), ("ip", "netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                _run(*command)


@contextlib.contextmanager
def namespace(number: int = 1) -> Iterator[Namespace | str]:
    """A namespace, or why this machine does not allow one."""
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing:
        yield f"there is no {missing[0]} on this machine"
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
