"""The registry: which adapters are served, by name.

It is kept here and not in gateways, because a name has to mean the same at all of them, whichever was told to load it.
Gateways are told whenever it changes, so one that joins knows all adapters. A scheduler that was restarted takes the
registry over from the gateway that was told the newest one by the scheduler before. That gateway may join after others
have asked for adapters: what was loaded or unloaded since the start counts more than what is taken over. Nothing of it
decides which KV a request may use: requests name the content of their adapter.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
from pagewise_scheduler.server.sessions import text_flaw

log = logging.getLogger(__name__)

_MAX_NAME, _MAX_PATH = 256, 1024
_MAX_ERROR_TEXT = 1000
_TOO_MANY = f"{MAX_ADAPTERS} adapters are the most that are served"
_MOST_PENDING = 1024
_MOST_UNLOADED = 4 * MAX_ADAPTERS
"""Names that are remembered because they were unloaded, so that no gateway brings them back."""
_MAX_INT63 = 2**63 - 1

Answer = Callable[[AdapterAnswer], None]


def flaw_of_adapter(adapter: Adapter) -> str | None:
    """What is wrong with what a gateway says of an adapter; None: nothing."""
    if not adapter.name or not adapter.path:
        return "an adapter without a name or a path"
    if text_flaw(adapter, ("name",), _MAX_NAME) or text_flaw(adapter, ("path",), _MAX_PATH):
        return (
            f"an adapter whose name is longer than {_MAX_NAME} characters, its path than {_MAX_PATH}, or not printable"
        )
    if len(adapter.content) != HASH_BYTES or not all(
        0 <= number <= _MAX_INT63 for number in (adapter.num_bytes, adapter.rank, adapter.created)
    ):
        return "an adapter whose hash or size is none"
    return None


@dataclass(slots=True, eq=False)
class _Trial:
    """An adapter that executors are loading. ``missing``: how many have not answered; ``tried``: whether any has."""

    message: RegisterAdapter
    answer: Answer
    missing: int
    tried: bool = False
    error: str = ""


class AdapterRegistry:
    """The adapters that are served. ``version``: see ``AdapterState``. ``executors``: those that take requests.

    Executors load whatever path an adapter names, so gateways may name only the adapters that the scheduler's own
    ``rights`` allow.
    """

    def __init__(self, executors: Callable[[], Sequence[ExecutorHandle]], rights: AdapterRights) -> None:
        self.version = 0
        self._executors = executors
        self._rights = rights
        self._adapters: dict[str, Adapter] = {}
        # Of this life: the version of its first change and of what was taken over; and what was changed by name.
        self._first_version: int | None = None
        self._adopted_version = 0
        self._loaded: set[str] = set()
        self._unloaded: dict[str, None] = {}
        self._pending: list[tuple[RegisterAdapter, Answer]] = []

    def refusal(self, adapter: Adapter) -> str | None:
        """Return why no gateway may have this adapter served; None if one may."""
        if self._rights.updating or self._rights.modules.get(adapter.name) == adapter.path:
            return None
        return (
            "the scheduler was started neither with --lora-modules "
            f"{printable(adapter.name)}={printable(adapter.path)} nor with --allow-runtime-lora-updating"
        )

    def state(self, epoch: int) -> AdapterState:
        """All of them, for a gateway."""
        return AdapterState(epoch, self.version, tuple(self._adapters.values()))

    def adopt(self, version: int, adapters: Iterable[Adapter]) -> None:
        """Take over what a gateway was told by the scheduler before, if nothing newer of that has been taken over."""
        first = self._first_version
        of_this_life = first is not None and first <= version <= self.version
        if of_this_life or not self._adopted_version < version <= _MAX_INT63:
            return
        self._adopted_version = version
        own = {name: adapter for name, adapter in self._adapters.items() if name in self._loaded}
        kept_out = own.keys() | self._unloaded.keys()
        found = {one.name: one for one in adapters if one.name not in kept_out and self._flaw(one) is None}
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
        """Serve an adapter once the executors have loaded it to their hosts; ``answer`` is told what became of it."""
        adapter = message.adapter
        known = self._adapters.get(adapter.name)
        if (flaw := self._flaw(adapter) or self._clash(message)) is not None:
            answer(AdapterAnswer(message.number, "refused", flaw))
        elif known is not None and (known.content, known.path) == (adapter.content, adapter.path):
            answer(AdapterAnswer(message.number))
        elif able := [one for one in self._executors() if one.scheduler.features.adapters.serves(adapter)]:
            self._try(message, answer, able)
        else:
            self._wait(message, answer)

    def _flaw(self, adapter: Adapter) -> str | None:
        return flaw_of_adapter(adapter) or self.refusal(adapter)

    def _clash(self, message: RegisterAdapter) -> str | None:
        """Why an adapter cannot be served beside those that are; None: it can."""
        name = message.adapter.name
        if name in self._adapters:
            text = f"an adapter called {name!r} is loaded already; unload it, or replace it (load_inplace)"
            return None if message.replace else text
        return _TOO_MANY if len(self._adapters) >= MAX_ADAPTERS else None

    def _wait(self, message: RegisterAdapter, answer: Answer) -> None:
        """No executor can load an adapter now: keep the message until one joins, or refuse it."""
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
        """Serve an adapter no more. Requests that run go on with it."""
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
        """There is an executor: what waited for one is tried."""
        pending, self._pending = self._pending, []
        for message, answer in pending:
            self.register(message, answer)

    # ---- inside --------------------------------------------------------------------------------------

    def _try(self, message: RegisterAdapter, answer: Answer, executors: Sequence[ExecutorHandle]) -> None:
        trial = _Trial(message, answer, len(executors))

        def told(error: str | None, *, lost: bool = False) -> None:
            trial.missing -= 1
            trial.tried |= not lost
            trial.error = trial.error or error or ""
            if not trial.missing:
                self._tried(trial)

        for executor in executors:
            executor.scheduler.features.adapters.check(message.adapter, told)
            executor.touch()

    def _tried(self, trial: _Trial) -> None:
        message, adapter = trial.message, trial.message.adapter
        if trial.error:
            text = printable(trial.error, _MAX_ERROR_TEXT)
            log.warning("%s", text)
            trial.answer(AdapterAnswer(message.number, "refused", text))
        elif not trial.tried:  # all executors that were asked are gone; others may have joined meanwhile
            self.register(message, trial.answer)
        elif (clash := self._clash(message)) is not None:  # another request was faster
            trial.answer(AdapterAnswer(message.number, "refused", clash))
        else:
            self._adapters[adapter.name] = adapter
            self._loaded.add(adapter.name)
            self._unloaded.pop(adapter.name, None)
            about = adapter.name, adapter.path, adapter.rank, adapter.content.hex()
            log.info("the adapter %s is served: %s, rank %d, %s", *about)
            self._changed()
            trial.answer(AdapterAnswer(message.number))

    def _changed(self) -> None:
        # Greater than the versions of an earlier scheduler, of which a gateway may tell later.
        self.version = max(self.version + 1, time.time_ns() // 1_000_000)
        if self._first_version is None:
            self._first_version = self.version
