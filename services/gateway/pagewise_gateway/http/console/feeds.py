"""Asks the scheduler for the views that consoles show: each view once for all consoles, while at least one shows it."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar

import msgspec
from aiohttp import web
from pagewise_shared.protocol import ConsoleView
from pagewise_shared.protocol.gateway_messages import UPDATE_SECONDS

from pagewise_gateway.generation import AdmissionError
from pagewise_gateway.http.writing import encode
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import SchedulerClient
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_CONSOLES = 32
"""Consoles of one gateway that may be open at once."""

_LONGEST_TEXT = 400
"""Characters of the text of one block or prefix."""
_KEY = "the console"
"""Whose turn it is when text is made: none of an API key."""
ALIVE_SECONDS = 5.0
"""How often a console gets a comment when nothing changes: the page takes 15 seconds of silence, and ``pagewise top``
10, for a gateway that is gone."""


class Watcher:
    """One console, and the frames that it has not been sent yet: the newest of each view, so that a client that reads
    slowly costs no more memory."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._frames: dict[ConsoleView, bytes] = {}
        self._news = asyncio.Event()
        self._closed = False

    def put(self, view: ConsoleView, frame: bytes) -> None:
        """Keep a newer frame of a view, and drop the previous one if it was not sent yet."""
        if view in self._frames:
            self._metrics.console_frames_dropped.inc()
        self._frames[view] = frame
        self._news.set()

    def close(self) -> None:
        """End the stream: there are no more frames."""
        self._closed = True
        self._news.set()

    async def take(self) -> bytes:
        """Wait for new frames and take all of them, or a comment if there are none for some seconds. An empty result
        means that the stream has ended."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await self._news.wait()
        except TimeoutError:
            return b": nothing has changed\n\n"
        if self._closed:
            return b""
        self._news.clear()
        frames, self._frames = self._frames, {}
        return b"".join(frames.values())


class _Feed:
    """One view, and the consoles that show it.

    ``body``: the last answer of the scheduler, None if it was not shown.
    """

    def __init__(self, view: ConsoleView) -> None:
        self.view = view
        self.watchers: dict[Watcher, None] = {}
        self.body: bytes | None = None
        self.frame = b""
        self.task: asyncio.Task[None] | None = None

    def put(self, frame: bytes) -> None:
        """Give all consoles a frame; an empty one, if there is nothing to show any more, is not sent."""
        self.frame = frame
        for watcher in self.watchers if frame else ():
            watcher.put(self.view, frame)


class Feeds:
    """The views that the consoles of one gateway show."""

    KEY: ClassVar[web.AppKey["Feeds"]] = web.AppKey("console_feeds")

    def __init__(self, scheduler_client: SchedulerClient, metrics: Metrics, tokenizer: Tokenizer) -> None:
        self._scheduler_client = scheduler_client
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._feeds: dict[ConsoleView, _Feed] = {}
        self._watchers: dict[Watcher, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many consoles are open."""
        return len(self._watchers)

    @contextmanager
    def watching(self, views: Iterable[ConsoleView]) -> Iterator[Watcher]:
        """Return a context in which a console watches views."""
        watcher = Watcher(self._metrics)
        self._watchers[watcher] = None
        self._metrics.consoles_open.set(len(self))
        feeds = [self._feed(view) for view in dict.fromkeys(views)]
        try:
            for feed in feeds:
                feed.watchers[watcher] = None
                if feed.frame:
                    watcher.put(feed.view, feed.frame)
            yield watcher
        finally:
            del self._watchers[watcher]
            self._metrics.consoles_open.set(len(self))
            for feed in feeds:
                del feed.watchers[watcher]
                if not feed.watchers:
                    del self._feeds[feed.view]
                    if feed.task is not None:
                        feed.task.cancel()

    async def close(self, _: web.Application) -> None:
        """End the streams of all consoles, because the gateway stops."""
        for watcher in self._watchers:
            watcher.close()

    async def wait(self, _: web.Application) -> None:
        """Wait until no view is asked for any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _feed(self, view: ConsoleView) -> _Feed:
        feed = self._feeds.get(view)
        if feed is None:
            feed = self._feeds[view] = _Feed(view)
            feed.task = asyncio.create_task(self._ask(feed), name=f"console {view.part}")
            self._tasks.add(feed.task)
            feed.task.add_done_callback(self._tasks.discard)
        return feed

    async def _ask(self, feed: _Feed) -> None:
        """Ask for a view again and again."""
        while True:
            began = monotonic()
            if (frame := await self._answer(feed)) != feed.frame:
                feed.put(frame)
            await asyncio.sleep(max(0.05, began + UPDATE_SECONDS[feed.view.part] - monotonic()))

    async def _answer(self, feed: _Feed) -> bytes:
        """Return the events of the current state of a view, or the event with the reason why it is not shown."""
        view = feed.view
        try:
            body = await self._scheduler_client.queries.report("console", view=view)
            if body == feed.body:
                return feed.frame
            had_problem, feed.body = feed.body is None and feed.frame, body
            if not body:  # nothing is shown any more, but for the end of a problem
                return _problem(view, "") if had_problem else b""
            return self._frame(view, await with_text(self._tokenizer, body) if view.tokens else body)
        except AdmissionError as error:
            problem = str(error)
        except LookupError:
            problem = f"there is no executor {view.executor_id!r} with a tier {view.tier!r}"
        except Exception:
            log.exception("the %s of a console could not be made", view.part)
            problem = "internal error; see the gateway's log"
        feed.body = None
        return _problem(view, problem)

    def _frame(self, view: ConsoleView, body: bytes) -> bytes:
        lines = body.split(b"\n")
        if view.part == "fleet":
            lines = [b'%b,"consoles":%d}' % (line[:-1], len(self)) for line in lines]
        name = view.part.encode()
        return b"".join(b"event: %b\ndata: %b\n\n" % (name, line) for line in lines)


async def with_text(tokenizer: Tokenizer, body: bytes) -> bytes:
    """Return JSON in which each object with ``token_ids`` has their ``text`` instead."""
    return await tokenizer.off_loop(lambda: msgspec.json.encode(_replaced(tokenizer, msgspec.json.decode(body))), _KEY)


def _replaced(tokenizer: Tokenizer, value: Any) -> Any:
    if isinstance(value, list):
        return [_replaced(tokenizer, one) for one in value]
    if not isinstance(value, dict):
        return value
    shown = {name: _replaced(tokenizer, one) for name, one in value.items() if name != "token_ids"}
    if "token_ids" in value:
        shown["text"] = tokenizer.decode(value["token_ids"], skip_special_tokens=False)[:_LONGEST_TEXT]
    return shown


def _problem(view: ConsoleView, message: str) -> bytes:
    """The event with the reason why a part is not shown; without a message, the part has no content yet."""
    return b"event: problem\ndata: %b\n\n" % encode({"part": view.part, "message": message})
