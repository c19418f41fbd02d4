"""Sends many requests to the services at once, from an event loop on a thread of its own.

The thread makes it work in notebooks, where an event loop already runs.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from pagewise.llm.types import LLMError

T = TypeVar("T")

_BUSY = 429
_MOST_PAUSE = 5.0


class Client:
    """Requests to a gateway, at most ``at_once`` of them at the same time."""

    def __init__(self, url: str, api_key: str, at_once: int) -> None:
        self._url, self._at_once = url, at_once
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewise-client", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._run(self._open())

    def post_all(self, path: str, bodies: Sequence[dict[str, Any]], done: Callable[[], object]) -> list[Any]:
        """Return the answers to these bodies, in their order. ``done``: called after each of them, on another thread.

        If one is refused, the others are aborted.

        Raises:
            LLMError: a request was refused; the text names it and the reason.
            OSError: the gateway has gone.
        """
        return self._run(self._post_all(path, bodies, done))

    def owns_thread(self) -> bool:
        """Whether the calling thread is this object's own."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Close the connections, which aborts running requests, and end the thread."""
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: nothing waits for the result any more
            future.cancel()
            raise

    async def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=self._at_once)
        return aiohttp.ClientSession(
            self._url, headers=self._headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def _post_all(self, path: str, bodies: Sequence[dict[str, Any]], done: Callable[[], object]) -> list[Any]:
        answers: list[Any] = [None] * len(bodies)
        waiting = iter(enumerate(bodies))

        async def work() -> None:
            for number, body in waiting:  # one iterator for all workers
                try:
                    answers[number] = await self._post(path, body)
                except LLMError as error:
                    where = f"prompt {number}: " if len(bodies) > 1 else ""
                    raise LLMError(f"{where}{error}", error.status) from None
                done()

        workers = [asyncio.ensure_future(work()) for _ in range(min(self._at_once, len(bodies)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return answers

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = msgspec.json.encode(body)
        while True:
            try:
                async with self._session.post(path, data=data) as answer:
                    content = await answer.read()
            except aiohttp.ClientError as error:
                raise ConnectionError(str(error)) from error
            if answer.status == 200:
                return msgspec.json.decode(content)
            if answer.status != _BUSY:
                raise LLMError(_reason(content), answer.status)
            # The server's queue is full. All requests in it are ours, so there will be room.
            await asyncio.sleep(min(float(answer.headers.get("Retry-After", 1)), _MOST_PAUSE))


def _reason(content: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(content)["error"]["message"])
    return content[:200].decode(errors="replace")
