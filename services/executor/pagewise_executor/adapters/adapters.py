"""The adapters of one executor: loads them beside the steps, and knows which one is in which slot."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch
from pagewise_shared.errors import AdapterError
from pagewise_shared.protocol import AdapterLoaded, LoadAdapter

from pagewise_executor.adapters.host import HostAdapters
from pagewise_executor.adapters.layers import AdapterContext, adapt_linears
from pagewise_executor.adapters.slots import Slots, TorchSlots
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.plan_checks import InvalidPlanError

log = logging.getLogger(__name__)


class Adapters:
    """Loads adapters on a thread of its own, one after the other. ``slots``: those of the device."""

    def __init__(self, host: HostAdapters, slots: Slots) -> None:
        self.slots = slots
        self._host = host
        self._in_slot: dict[int, tuple[int, bytes]] = {}  # epoch and content
        self._epoch = 0
        self._lock = threading.Lock()
        self._report: Callable[[AdapterLoaded], None] = lambda message: None
        self._inbox: queue.SimpleQueue[LoadAdapter | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def report_to(self, report: Callable[[AdapterLoaded], None]) -> None:
        """Call ``report``, on the thread that loads, when an adapter is there or cannot be."""
        self._report = report

    def load(self, message: LoadAdapter) -> None:
        """Load an adapter; called from any thread."""
        self._inbox.put(message)

    def reset(self, epoch: int) -> None:
        """Void what was loaded under earlier epochs. What lies on the host stays."""
        with self._lock:
            self._epoch = epoch
            self._in_slot = {slot: held for slot, held in self._in_slot.items() if held[0] >= epoch}

    def check(self, slots: Iterable[int]) -> None:
        """Check that the adapters of rows that join are there.

        Raises:
            InvalidPlanError: a slot is empty.
        """
        for slot in slots:
            if slot >= 0 and slot not in self._in_slot:
                raise InvalidPlanError(f"a row joins with the adapter in slot {slot}, where none has been loaded")

    def close(self) -> None:
        """End the thread once what it loads is there."""
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
            self._in_slot.pop(slot, None)
            in_slots = {content for _, content in self._in_slot.values()}
        held, evicted = self._host.get(adapter), tuple[bytes, ...]()
        found = held
        if found is None:
            found, evicted = self._host.read(adapter, in_slots)
        if slot >= 0:
            self.slots.put(slot, found)
            with self._lock:
                if message.epoch >= self._epoch:
                    self._in_slot[slot] = message.epoch, adapter.content
        took = int((time.perf_counter() - began) * 1e6)
        return AdapterLoaded(message.epoch, message.number, took, held is not None, evicted)


def make_adapters(config: SizedConfig, loaded: LoadedModel) -> Adapters | None:
    """Return what serves adapters of a model, and wrap its linear layers; None without ``--enable-lora``."""
    if not config.enable_lora:
        return None
    context = AdapterContext()
    layers = adapt_linears(loaded.model, context)
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
