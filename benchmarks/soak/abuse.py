"""Harmful requests of a stranger with an API key: each is refused, or is served within the key's limits."""

import asyncio
import gzip
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp

from benchmarks.processes import Cluster

MODEL = "pagewise-demo"
_SECONDS = 20.0
_Body = Callable[[random.Random], bytes]


def _json(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def _many_outputs(rng: random.Random) -> bytes:
    stops = [chr(97 + number) * 1000 + str(rng.random()) for number in range(16)]
    return _json(prompt=["x"] * 32, n=128, max_tokens=16, stop=stops)


def _token_lists(rng: random.Random) -> bytes:
    ids = [rng.randrange(4096) for _ in range(100_000)]
    return _json(prompt=["x"] * 60, max_tokens=4, allowed_token_ids=ids)


def _many_messages(rng: random.Random) -> bytes:
    message = {"role": rng.choice(["user", "assistant"]), "content": "y"}
    return _json(messages=[message] * 50_000, max_tokens=4)


def _gzip_bomb(rng: random.Random) -> bytes:
    return gzip.compress(_json(prompt=rng.choice("abc") * 50_000_000), 1)


BODIES: dict[str, tuple[str, _Body]] = {
    "many outputs with long stop strings": ("/v1/completions", _many_outputs),
    "token lists": ("/v1/completions", _token_lists),
    "nested arrays": ("/v1/completions", lambda rng: b'{"prompt": [' + b"[]," * rng.randrange(10**5, 10**6) + b"[]]}"),
    "a body over the limit": ("/v1/completions", lambda _: _json(prompt="z" * 20_000_000)),
    "template arguments": (
        "/v1/chat/completions",
        lambda _: _json(
            messages=[{"role": "user", "content": "y"}], chat_template_kwargs={str(n): n for n in range(200_000)}
        ),
    ),
    "many messages": ("/v1/chat/completions", _many_messages),
    "log-probabilities of many outputs": (
        "/v1/completions",
        lambda rng: _json(
            prompt=["x"] * rng.choice([1, 8, 32]), n=128, max_tokens=16, logprobs=20, stream=rng.random() < 0.5
        ),
    ),
    "a long prompt that all outputs repeat": (
        "/v1/completions",
        lambda rng: _json(prompt=[9] * rng.choice([100, 1000]), n=128, max_tokens=1, echo=True, logprobs=20),
    ),
    "token counts in every chunk": (
        "/v1/completions",
        lambda _: _json(
            prompt=["x"] * 32,
            n=128,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ),
    "a long text to tokenize": ("/tokenize", lambda rng: _json(prompt=rng.choice(["a ", "é", "\n"]) * 1_000_000)),
    "an unknown field with a long name": ("/v1/completions", lambda _: _json(prompt="x", **{"q" * 1_000_000: 1})),
    "a priority before everybody's": ("/v1/completions", lambda _: _json(prompt="x", max_tokens=64, priority=-1000000)),
    "no JSON": ("/v1/completions", lambda rng: rng.randbytes(100_000)),
    "a body that inflates": ("/v1/completions", lambda rng: _BOMBS[rng.randrange(len(_BOMBS))]),
    "a small body of many arrays": ("/v1/completions", lambda _: b'{"prompt": [' + b"[1]," * 16_000 + b"[1]]}"),
}
"""The path of each kind of request, and the function that makes its body."""
_ENCODED = {"a body that inflates": {"Content-Encoding": "gzip"}}
_BOMBS: list[bytes] = [_gzip_bomb(random.Random(seed)) for seed in range(2)]


class Abuser:
    """Sends such requests with one API key, a few at a time, and now and then disconnects before the answer.

    With another key come bodies that never end: with the same one, they would take most of a key's share at a time, and
    the others would be refused for that reason.

    ``answers``: how many came, by kind and status; ``failures``: answers that say that a server failed.
    """

    def __init__(
        self, key: str, other_key: str, ready: Callable[[], Awaitable[None]], at_once: int = 3, seed: int = 0
    ) -> None:
        """``ready`` is waited for before each request."""
        self._ready = ready
        self.answers: Counter[tuple[str, int]] = Counter()
        self.failures: list[str] = []
        self._key, self._other_key, self._at_once, self._rng = key, other_key, at_once, random.Random(seed)

    async def run(self, cluster: Cluster) -> None:
        """Send until cancelled."""
        timeout = aiohttp.ClientTimeout(_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, asyncio.TaskGroup() as tasks:
            for _ in range(self._at_once):
                tasks.create_task(self._client(cluster, session))
            tasks.create_task(self._unfinished_bodies(cluster))
            tasks.create_task(self._tiny_chunks(cluster))
            tasks.create_task(self._document(cluster, session))

    async def _client(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        while True:
            await self._ready()
            kind = self._rng.choice(sorted(BODIES))
            path, make = BODIES[kind]
            url = self._gateway(cluster) + path
            patience = self._rng.choice([0.3, _SECONDS])
            await self._ask(
                kind, session, url, patience, method="POST", data=make(self._rng), headers=_ENCODED.get(kind)
            )
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))

    async def _document(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        """The document of the API, from sixteen connections at a time."""
        while True:
            await self._ready()
            url = self._gateway(cluster) + "/openapi.json"
            await asyncio.gather(*[self._ask("the document of the API", session, url) for _ in range(16)])
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))

    async def _tiny_chunks(self, cluster: Cluster) -> None:
        """A body of a megabyte in chunks of one byte, and then an extension that does not end."""
        head = self._head("Transfer-Encoding: chunked")
        while True:
            await self._ready()
            try:
                reader, writer = await self._connect(cluster)
                writer.write(head + b"1\r\n \r\n" * self._rng.choice([0, 1_000_000]) + b"5;" + b"x" * 1_000_000)
                async with asyncio.timeout(_SECONDS):
                    status = (await reader.readline()).split(b" ")[1:2]
                self.answers["tiny chunks", int(status[0]) if status else 0] += 1
                writer.transport.abort()
            except (OSError, TimeoutError):
                self.answers["tiny chunks", 0] += 1
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))

    async def _unfinished_bodies(self, cluster: Cluster) -> None:
        """Twenty at a time that stop in the middle, for some seconds."""
        head = self._head("Content-Length: 3000000")
        while True:
            await self._ready()
            writers = []
            for _ in range(20):
                try:
                    _, writer = await self._connect(cluster)
                except OSError:
                    break
                writer.write(head + b"x" * 1_000_000)
                writers.append(writer)
            await asyncio.sleep(self._rng.uniform(1.0, 8.0))
            for writer in writers:
                writer.transport.abort()

    def _gateway(self, cluster: Cluster) -> str:
        """The address of some gateway."""
        return self._rng.choice(list(cluster.urls.values()))

    async def _ask(
        self,
        kind: str,
        session: aiohttp.ClientSession,
        url: str,
        patience: float = _SECONDS,
        *,
        method: str = "GET",
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a request, and count its answer, or that none came within ``patience`` seconds."""
        request = session.request(method, url, data=data, headers=headers)
        try:
            async with asyncio.timeout(patience), request as answer:
                await answer.read()
                self.answers[kind, answer.status] += 1
                if answer.status == 500:
                    self.failures.append(f"{kind}: {(await answer.text())[:300]}")
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.answers[kind, 0] += 1

    async def _connect(self, cluster: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own, for bytes that an HTTP client would not send."""
        host, port = self._gateway(cluster).removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port))

    def _head(self, field: str) -> bytes:
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {self._other_key}\r\n"
            f"Content-Type: application/json\r\n{field}\r\n\r\n"
        ).encode()
