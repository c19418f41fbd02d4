"""Asks an executor for the adapters that its requests wait for, and takes in what it answers."""

from collections.abc import Callable

from pagewise_shared.logs import printable
from pagewise_shared.protocol import Adapter, AdapterLoaded, Message

from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.adapter_scheduler import AdapterScheduler
from pagewise_scheduler.core.scheduling.adapter_slots import Checked

_MAX_ERROR_TEXT = 1000


class AdapterLoads:
    """The loads of one engine.

    ``send``: to its executor. ``fail``: ends a request with an error for its client. ``touch``: there is something to
    plan.
    """

    def __init__(
        self,
        scheduler: AdapterScheduler,
        send: Callable[[Message], None],
        fail: Callable[[Request, str], None],
        touch: Callable[[], None],
    ) -> None:
        self._scheduler, self._send, self._fail, self._touch = scheduler, send, fail, touch

    def check(self, adapter: Adapter, checked: Checked) -> None:
        """See whether the executor can load an adapter; ``checked`` is told."""
        self._scheduler.adapters.check(adapter, checked)
        self._touch()

    def plan_ahead(self) -> None:
        """Admit requests whose adapters are there now, and send the loads that others wait for."""
        adapters = self._scheduler.adapters
        if adapters.waiting:
            self._scheduler.admit_parked(clock())
        if adapters.has_loads:
            for load in adapters.take_loads(self._scheduler.epoch):
                self._send(load)

    def take(self, message: AdapterLoaded) -> None:
        """An adapter has been loaded, or could not be."""
        self._touch()
        for request in self._scheduler.adapter_loaded(message, clock()):
            self._fail(request, printable(message.error, _MAX_ERROR_TEXT))
