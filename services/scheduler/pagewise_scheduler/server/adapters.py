"""The registry of adapters that are served, by name.

The scheduler keeps it, because a name has to mean the same adapter at all gateways, and sends every change to all of
them. After a restart, the scheduler adopts the registry from the gateway that received the newest one. This gateway may
join after others have loaded or unloaded adapters: changes since the restart take precedence. The registry does not
decide which KV a request may use: requests carry the content hash of their adapter.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.config.adapter_options import AdapterRights
from pagewise_shared.logs import printable
from pagewise_shared.protocol import (
    MAX_ADAPTERS,
    Adapter,
    AdapterAnswer,
    AdapterState,
    RegisterAdapter,
    UnregisterAdapter,
)

from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.sessions import text_error

log = logging.getLogger(__name__)

_MAX_NAME, _MAX_PATH = 256, 1024
_MAX_ERROR_TEXT = 1000
_TOO_MANY = f"{MAX_ADAPTERS} adapters are the most that are served"
_MOST_PENDING = 1024
_MOST_UNLOADED = 4 * MAX_ADAPTERS
"""Unloaded names to remember, so that adopting an older registry does not bring them back."""
_MAX_INT63 = 2**63 - 1

Answer = Callable[[AdapterAnswer], None]


def adapter_error(adapter: Adapter) -> str | None:
    """Return why a gateway's description of an adapter is not acceptable; None if it is."""
    if not adapter.name or not adapter.path:
        return "an adapter without a name or a path"
    if text_error(adapter, ("name",), _MAX_NAME) or text_error(adapter, ("path",), _MAX_PATH):
        return (
            f"an adapter whose name is longer than {_MAX_NAME} characters, its path than {_MAX_PATH}, or not printable"
        )
    if len(adapter.content) != HASH_BYTES or not all(
        0 <= number <= _MAX_INT63 for number in (adapter.num_bytes, adapter.rank, adapter.created)
    ):
        return "an adapter whose hash or size is none"
    return None


class AdapterRegistry:
    """The adapters that are served. ``version``: as in ``AdapterState``. ``executors``: the executors that take
    requests.

    Executors load any path that an adapter names, so gateways may name only adapters that the scheduler's ``rights``
    allow.
    """

    def __init__(self, executors: Callable[[], Sequence[ExecutorHandle]], rights: AdapterRights) -> None:
        self.version = 0
        self._executors = executors
        self._rights = rights
        self._adapters: dict[str, Adapter] = {}
        # Since the start: the version of the first change and of the adopted registry, and the names that changed.
        self._first_version: int | None = None
        self._adopted_version = 0
        self._loaded: set[str] = set()
        self._unloaded: dict[str, None] = {}
        self._pending: list[tuple[RegisterAdapter, Answer]] = []

    def refusal(self, adapter: Adapter) -> str | None:
        """Return why no gateway may have this adapter served; None if they may."""
        if self._rights.updating or self._rights.modules.get(adapter.name) == adapter.path:
            return None
        return (
            "the scheduler was started neither with --lora-modules "
            f"{printable(adapter.name)}={printable(adapter.path)} nor with --allow-runtime-lora-updating"
        )

    def state(self, epoch: int) -> AdapterState:
        """Return the message with all adapters for a gateway."""
        return AdapterState(epoch, self.version, tuple(self._adapters.values()))

    def adopt(self, version: int, adapters: Iterable[Adapter]) -> None:
        """Adopt the registry that a gateway received from an earlier scheduler, unless a newer one has been adopted."""
        first = self._first_version
        of_this_life = first is not None and first <= version <= self.version
        if of_this_life or not self._adopted_version < version <= _MAX_INT63:
            return
        self._adopted_version = version
        own = {name: adapter for name, adapter in self._adapters.items() if name in self._loaded}
        kept_out = own.keys() | self._unloaded.keys()
        found = {one.name: one for one in adapters if one.name not in kept_out and self._error(one) is None}
        for name in list(found)[MAX_ADAPTERS - len(own) :]:
            log.warning("the adapter %s is not taken over: %s", printable(name), _TOO_MANY)
            del found[name]
        self._adapters = found | own
        if first is None:
            self.version = version
        else:
            self.version = max(self.version, version)
            self._changed()
        if found:
            log.info("%d adapters are taken over from a gateway", len(found))

    def register(self, message: RegisterAdapter, answer: Answer) -> None:
        """Serve an adapter once the executors have loaded it to their hosts; ``answer`` is called with the result."""
        adapter = message.adapter
        known = self._adapters.get(adapter.name)
        if (error := self._error(adapter) or self._clash(message)) is not None:
            answer(AdapterAnswer(message.number, "refused", error))
        elif known is not None and (known.content, known.path) == (adapter.content, adapter.path):
            answer(AdapterAnswer(message.number))
        elif able := [one for one in self._executors() if one.scheduler.features.adapters.serves(adapter)]:
            self._try(message, answer, able)
        else:
            self._wait(message, answer)

    def _error(self, adapter: Adapter) -> str | None:
        return adapter_error(adapter) or self.refusal(adapter)

    def _clash(self, message: RegisterAdapter) -> str | None:
        """Return why an adapter cannot be served beside the others; None if it can."""
        name = message.adapter.name
        if name in self._adapters:
            text = f"an adapter called {name!r} is loaded already; unload it, or replace it (load_inplace)"
            return None if message.replace else text
        return _TOO_MANY if len(self._adapters) >= MAX_ADAPTERS else None

    def _wait(self, message: RegisterAdapter, answer: Answer) -> None:
        """Without an executor that can load the adapter, keep the message until one joins, or refuse it."""
        adapter, executors = message.adapter, self._executors()
        text = "no executor is ready to load the adapter"
        if executors:
            text = (
                f"no executor serves adapters of rank {adapter.rank}: "
                "start them with --enable-lora, and with --max-lora-rank"
            )
        if message.waits and len(self._pending) < _MOST_PENDING:
            log.log(logging.WARNING if executors else logging.INFO, "the adapter %s waits: %s", adapter.name, text)
            self._pending.append((message, answer))
        else:
            answer(AdapterAnswer(message.number, "refused" if executors else "unavailable", text))

    def unregister(self, message: UnregisterAdapter, answer: Answer) -> None:
        """Stop serving an adapter. Running requests keep it."""
        if not self._rights.updating:
            text = "the scheduler was not started with --allow-runtime-lora-updating"
            answer(AdapterAnswer(message.number, "refused", text))
            return
        if self._adapters.pop(message.name, None) is None:
            answer(AdapterAnswer(message.number, "unknown", f"there is no adapter {printable(message.name)!r}"))
            return
        log.info("the adapter %s is not served any more", printable(message.name))
        self._loaded.discard(message.name)
        self._unloaded[message.name] = None
        if len(self._unloaded) > _MOST_UNLOADED:
            del self._unloaded[next(iter(self._unloaded))]
        self._changed()
        answer(AdapterAnswer(message.number))

    def executor_joined(self) -> None:
        """Try the adapters that have waited for an executor."""
        pending, self._pending = self._pending, []
        for message, answer in pending:
            self.register(message, answer)

    # ---- inside --------------------------------------------------------------------------------------

    def _try(self, message: RegisterAdapter, answer: Answer, executors: Sequence[ExecutorHandle]) -> None:
        results: list[str | None] = []  # errors, "" after success, None of lost executors

        def on_loaded(error: str | None, *, lost: bool = False) -> None:
            results.append(None if lost else error or "")
            if len(results) == len(executors):
                self._complete(message, answer, results)

        for executor in executors:
            executor.scheduler.features.adapters.check(message.adapter, on_loaded)
            executor.touch()

    def _complete(self, message: RegisterAdapter, answer: Answer, results: Sequence[str | None]) -> None:
        adapter = message.adapter
        if error := next(filter(None, results), None):
            text = printable(error, _MAX_ERROR_TEXT)
            log.warning("%s", text)
            answer(AdapterAnswer(message.number, "refused", text))
        elif "" not in results:  # all executors that were asked are gone; others may have joined meanwhile
            self.register(message, answer)
        elif (clash := self._clash(message)) is not None:  # another request was faster
            answer(AdapterAnswer(message.number, "refused", clash))
        else:
            self._adapters[adapter.name] = adapter
            self._loaded.add(adapter.name)
            self._unloaded.pop(adapter.name, None)
            about = adapter.name, adapter.path, adapter.rank, adapter.content.hex()
            log.info("the adapter %s is served: %s, rank %d, %s", *about)
            self._changed()
            answer(AdapterAnswer(message.number))

    def _changed(self) -> None:
        # A time, so that it is greater than the versions of an earlier scheduler.
        self.version = max(self.version + 1, time.time_ns() // 1_000_000)
        if self._first_version is None:
            self._first_version = self.version
