"""The LoRA adapters that the scheduler has reported, and adapters that it is still to load."""

import asyncio
import logging
from collections.abc import Iterable

from pagewise_shared.logs import printable
from pagewise_shared.protocol import Adapter, AdapterState

log = logging.getLogger(__name__)


class AdapterError(Exception):
    """The scheduler cannot load or unload an adapter; the text gives the reason."""


class AdapterTable:
    """The adapters by name, as the scheduler reported them last.

    Fields:
        version: of the scheduler's last report; 0 before the first one.
        wanted: adapters of ``--lora-modules`` that no scheduler has answered about yet. Once it has, they are adapters
            like any others, and may be unloaded.
        timeout: see ``wait_for``.
    """

    def __init__(self, modules: Iterable[Adapter] = ()) -> None:
        self.version = 0
        self.wanted = {adapter.name: adapter for adapter in modules}
        self.timeout = 60.0
        self._adapters: dict[str, Adapter] = {}
        self._reported = False
        self._changed = asyncio.Event()

    async def wait_for(self, name: str) -> None:
        """Wait while an adapter of that name may still appear, ``timeout`` seconds at most.

        It may until a first scheduler has reported its adapters, and while executors load the adapters of
        ``--lora-modules``.
        """
        try:
            async with asyncio.timeout(self.timeout):
                while name not in self._adapters and (not self._reported or name in self.wanted):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of that name, if there is one."""
        return self._adapters.get(name)

    def all(self) -> tuple[Adapter, ...]:
        """Return all adapters."""
        return tuple(self._adapters.values())

    def update(self, state: AdapterState) -> None:
        """Replace the adapters by the reported adapters of the scheduler."""
        self.version, self._reported = state.version, True
        self._changed.set()
        self._adapters = {adapter.name: adapter for adapter in state.adapters}

    def module_answered(self, name: str, error: str) -> None:
        """The scheduler has loaded an adapter of ``--lora-modules``, or has not: ``error`` is its reason then."""
        self.wanted.pop(name, None)
        self._changed.set()
        if error:
            text = printable(error, 1000)
            log.error("the adapter %s, which this gateway was started with, is not served: %s", name, text)
