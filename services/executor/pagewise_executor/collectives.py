"""Collective operations of the ranks of one executor: sums, the logits, and the tokens that rank 0 samples.

The ranks of an executor with ``--tensor-parallel`` hold a part of the model each. They are processes of one host, or of
several, which ``torch.distributed`` joins: NCCL on GPUs, gloo on the CPU. All ranks make the same calls in the same
order.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in one call, which may be loading weights or compiling kernels."""


class Ranks:
    """The ranks of an executor, seen from one of them. As made by the constructor it is the only one.

    ``first``: whether this is rank 0, which samples. ``alone``: whether there is no other rank. ``on_host``: how many
    of them share this host's memory; None: all.
    """

    def __init__(self, rank: int = 0, size: int = 1, on_host: int | None = None) -> None:
        self.rank, self.size = rank, size
        self.first, self.alone = rank == 0, size == 1
        self.on_host = size if on_host is None else on_host
        self._interface = contextlib.ExitStack()

    def __deepcopy__(self, memo: object) -> "Ranks":
        return self  # they are of the process: copies of a module compute with the same ones

    @classmethod
    def join(
        cls, rank: int, size: int, store: Path | str, *, cuda: bool,
        listener: int | None = None, on_host: int | None = None, interface: str | None = None,
    ) -> "Ranks":  # fmt: skip
        """Meet the other ranks, and return when all are there.

        ``store``: a folder, through which ranks on one host find each other, or HOST:PORT at which rank 0 answers ranks
        on several nodes, on the socket ``listener``. ``interface``: the network interface to use between nodes; None:
        that of the host's name. ``cuda``: whether the ranks compute on GPUs; then this rank's GPU is the current
        device of this process.
        """
        import torch.distributed as dist

        ranks = cls(rank, size, on_host)
        meeting: Any
        if isinstance(store, Path):
            # All ranks are on this host. On the loopback interface no other host reaches these connections.
            interface = "lo" if sys.platform == "linux" else "lo0"
            meeting = dist.FileStore(str(store / "ranks"), size)  # type: ignore[attr-defined]
        else:
            host, _, port = store.rpartition(":")
            meeting = dist.TCPStore(  # type: ignore[attr-defined]
                host.strip("[]"), int(port), size, is_master=rank == 0, timeout=_TIMEOUT, wait_for_workers=False,
                master_listen_fd=listener,
            )  # fmt: skip
        with contextlib.ExitStack() as using:
            if interface is not None:
                using.enter_context(_interface(interface))
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=_TIMEOUT)
            ranks._interface = using.pop_all()  # NCCL connects at the first call
        return ranks

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, which may be ``x`` itself, changed."""
        if self.size == 1:
            return x
        x = x.contiguous()
        torch.distributed.all_reduce(x)
        return x

    def reduce_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, added in their order.

        So each element depends on the ranks' elements alone. In ``reduce`` the order depends on the size of the tensor
        and the place of an element in it, and so on the batch; with two ranks there is one order only.
        """
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x)
        total, *others = parts
        for part in others:
            total += part
        return total

    def gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return on rank 0 the logits [.., vocab_size] of which each rank has a part [.., part], padded at the end.

        The other ranks, which do not sample, get their part back.
        """
        if self.size == 1 or not local.numel():
            return local
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(self.size)] if self.first else None
        torch.distributed.gather(local, parts)
        return local if parts is None else torch.cat(parts, dim=-1)[..., :vocab_size]

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tokens int64 [n]. The other ranks pass a tensor of that size, which is overwritten."""
        if self.size > 1 and tokens.numel():
            tokens = tokens.contiguous()
            torch.distributed.broadcast(tokens, 0)
        return tokens

    def least(self, count: int) -> int:
        """Return the least of the counts of all ranks."""
        if self.size == 1:
            return count
        shared = torch.tensor(count)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
        return int(shared)

    def of_first(self, number: int) -> int:
        """Return rank 0's ``number``."""
        if self.size == 1:
            return number
        shared = torch.tensor(number)
        torch.distributed.broadcast(shared, 0)
        return int(shared)

    def leave(self) -> None:
        """End the connections between the ranks."""
        with self._interface:
            if self.size > 1:
                torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _interface(name: str) -> Iterator[None]:
    """Let gloo and NCCL use a network interface, unless the environment names another one.

    They read it from the environment, which is restored afterwards, for executors that this process starts.
    """
    added = [variable for variable in _INTERFACE_VARIABLES if variable not in os.environ]
    os.environ.update(dict.fromkeys(added, name))
    try:
        yield
    finally:
        for variable in added:
            os.environ.pop(variable, None)


ALONE = Ranks()
"""The only rank of an executor."""
