"""The adapters of one executor: loads them beside the steps, and knows which one is in which slot."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from pagewise_shared.errors import AdapterError
from pagewise_shared.protocol import AdapterLoaded, LoadAdapter

from pagewise_executor.adapters.host import HostAdapters, LayerFactors
from pagewise_executor.adapters.layers import AdaptedLinear, AdapterContext, adapt_linears
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.packed_linear import rounded_rows
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.step_work import Int64s

if TYPE_CHECKING:
    from pagewise_executor.adapters.triton_slots import TritonSlots

log = logging.getLogger(__name__)


class Adapters:
    """Loads adapters one after the other on a thread of its own. ``slots``: of the device."""

    def __init__(self, host: HostAdapters, slots: "TorchSlots | TritonSlots") -> None:
        self.slots = slots
        self._host = host
        self._in_slot: dict[int, tuple[int, bytes]] = {}  # epoch and content
        self._epoch = 0
        self._lock = threading.Lock()
        self._report: Callable[[AdapterLoaded], None] = lambda message: None
        self._inbox: queue.SimpleQueue[LoadAdapter | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def report_to(self, report: Callable[[AdapterLoaded], None]) -> None:
        """Call ``report``, on the loading thread, when an adapter has been loaded or has failed."""
        self._report = report

    def load(self, message: LoadAdapter) -> None:
        """Queue an adapter to be loaded; on any thread."""
        self._inbox.put(message)

    def reset(self, epoch: int) -> None:
        """Invalidate the adapters in slots that were loaded under earlier epochs. The host keeps its copies."""
        with self._lock:
            self._epoch = epoch
            self._in_slot = {slot: held for slot, held in self._in_slot.items() if held[0] >= epoch}

    def check(self, slots: Iterable[int]) -> None:
        """Check that the slots of joining rows hold adapters.

        Raises:
            InvalidPlanError: a slot is empty.
        """
        for slot in slots:
            if slot >= 0 and slot not in self._in_slot:
                raise InvalidPlanError(f"a row joins with the adapter in slot {slot}, where none has been loaded")

    def close(self) -> None:
        """End the thread behind the queued loads."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                answer = self._load(message)
            except AdapterError as error:
                log.warning("%s", error)
                answer = AdapterLoaded(message.epoch, message.number, error=str(error))
            except Exception as error:  # of any kind: requests wait for the answer
                log.exception("the adapter %r could not be loaded", message.adapter.name)
                answer = AdapterLoaded(message.epoch, message.number, error=f"{type(error).__name__}: {error}"[:500])
            self._report(answer)

    def _load(self, message: LoadAdapter) -> AdapterLoaded:
        adapter, slot, began = message.adapter, message.slot, time.perf_counter()
        with self._lock:
            if message.epoch < self._epoch:
                raise AdapterError("it was asked for under an earlier epoch")
            # Until the copy is complete the slot holds parts of two adapters, so no row may join with it.
            self._in_slot.pop(slot, None)
            in_slots = {content for _, content in self._in_slot.values()}
        held, evicted = self._host.get(adapter), tuple[bytes, ...]()
        found = held
        if found is None:
            found, evicted = self._host.read(adapter, in_slots)
        if slot >= 0:
            self.slots.put(slot, found)
            with self._lock:
                # A reset may have come during the copy. The scheduler then knows of no adapter in this slot.
                if message.epoch >= self._epoch:
                    self._in_slot[slot] = message.epoch, adapter.content
        took = int((time.perf_counter() - began) * 1e6)
        return AdapterLoaded(message.epoch, message.number, took, held is not None, evicted)


def make_adapters(config: SizedConfig, loaded: LoadedModel) -> Adapters | None:
    """Wrap the linear layers of a model, and return its adapters; None without ``--enable-lora``."""
    if not config.enable_lora:
        return None
    context = AdapterContext()
    layers = adapt_linears(loaded.model, context, [layer.name for layer in loaded.recurrent])
    most = config.max_cpu_loras or config.max_loras
    host = HostAdapters(layers, loaded.dtype, most, config.max_lora_rank, shards=loaded.shards)
    if (device := loaded.device).type == "cuda":

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            with torch.cuda.device(device):  # every thread begins on the first device
                return tensor.pin_memory()

        host.prepare = pin
    if loaded.kernels != "triton":
        return Adapters(host, TorchSlots(config.max_loras, context, loaded.device))
    from pagewise_executor.adapters.triton_slots import TritonSlots

    rank, most = config.max_lora_rank, max(config.max_num_seqs, config.max_num_batched_tokens)
    return Adapters(host, TritonSlots(config.max_loras, rank, layers, context, loaded.dtype, loaded.device, most))


class TorchSlots:
    """Slots for any device of PyTorch, whose adapters are added one after the other. On the CPU nothing is copied."""

    def __init__(self, num_slots: int, context: AdapterContext, device: torch.device) -> None:
        self._slots: list[LayerFactors] = [{} for _ in range(num_slots)]
        self._context, self._device = context, device

    def put(self, slot: int, factors: LayerFactors) -> None:
        """Put an adapter into a slot that no step in flight uses; on any thread. It is there when this returns."""
        if self._device.type == "cpu":
            self._slots[slot] = factors
            return
        self._slots[slot] = {
            layer: [pair.__class__(pair.part, pair.a.to(self._device), pair.b.to(self._device)) for pair in pairs]
            for layer, pairs in factors.items()
        }

    def begin(self, slots: Int64s) -> None:
        """Set the slot of each token's adapter [tokens] for the next forward pass, -1 for none."""
        self._context.add = partial(_add, self._groups(slots)) if (slots >= 0).any() else None

    def _groups(self, slots: Int64s) -> "list[_Group]":
        groups = []
        for slot in sorted(set(slots[slots >= 0].tolist())):
            (tokens,) = (slots == slot).nonzero()
            first, last = int(tokens[0]), int(tokens[-1]) + 1
            whole = last - first == len(tokens)
            index = None if whole else torch.from_numpy(tokens).to(self._device)
            groups.append(_Group(self._slots[slot], first, last, index))
        return groups


class _Group(NamedTuple):
    """The tokens of one adapter: ``tokens``, or ``first`` to ``last`` of the flat batch if ``tokens`` is None."""

    factors: LayerFactors
    first: int
    last: int
    tokens: torch.Tensor | None


def _add(groups: list[_Group], layer: AdaptedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
    for factors, first, last, tokens in groups:
        if (pairs := factors.get(layer.number)) is None:
            continue
        rows, padding = x[first:last] if tokens is None else x[tokens], 0
        if rows.device.type == "cpu" and rows.dtype != torch.float32:
            padding = rounded_rows(len(rows)) - len(rows)  # oneDNN computes these products
            rows = F.pad(rows, (0, 0, 0, padding))
        for pair in pairs:
            _, start, stop = layer.parts[pair.part]
            more = F.linear(F.linear(rows, pair.a), pair.b)[: len(rows) - padding]
            if tokens is None:
                y[first:last, start:stop] += more
            else:
                y[:, start:stop].index_add_(0, tokens, more)
