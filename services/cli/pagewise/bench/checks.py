"""Finds out about a server before it is measured: its model, its limits, and what it supports."""

import asyncio
import json
import time
from typing import Any

import aiohttp

from pagewise.bench.client import Client
from pagewise.bench.metrics import Outcome
from pagewise.bench.servers import BenchError, Server
from pagewise.bench.texts import DEFAULT_TOKENS_PER_WORD, WORDS, calibrate

_PROBE_TOKENS = 8
_SECONDS = 60.0


async def check(http: aiohttp.ClientSession, server: Server, fields: dict[str, Any], wait_seconds: float) -> None:
    """Look at a server, and note what it is and supports. ``wait_seconds``: how long to wait until it answers.

    Raises:
        BenchError: it does not answer, has no such model, wants a key, or refuses requests like those of the load.
    """
    models = await _models(http, server, wait_seconds)
    _choose_model(server, models)
    server.version = await _version(http, server)
    outcome = await _probe(Client(http, server, fields), [model["id"] for model in models])
    if outcome.output_tokens is None:
        server.streams_usage = False
        server.notes.append(
            f"{server.name} does not tell token counts in its streams (stream_options.include_usage): output tokens "
            "are counted as events, input tokens are not known"
        )


async def calibration(http: aiohttp.ClientSession, server: Server, fields: dict[str, Any]) -> tuple[float, float]:
    """Return tokens per word and overhead of a prompt, as the server counts them; without usage an assumption.

    Raises:
        BenchError: it does not answer.
    """
    counted = []
    for words in (WORDS[:1], WORDS):  # all of them: prompts are made of each as often
        outcome = await Client(http, server, fields).send(prompt_of(server, " ".join(words)), 1)
        if outcome.error:
            raise BenchError(f"{server.name}: a prompt of {len(words)} words fails: {outcome.error}: {outcome.detail}")
        if outcome.prompt_tokens is None:
            return DEFAULT_TOKENS_PER_WORD, 0.0
        counted.append((len(words), outcome.prompt_tokens))
    return calibrate(*counted)


def prompt_of(server: Server, text: str) -> str | list[dict[str, str]]:
    """Return a text as a prompt of the server's endpoint."""
    return [{"role": "user", "content": text}] if server.is_chat else text


async def _models(http: aiohttp.ClientSession, server: Server, wait_seconds: float) -> list[dict[str, Any]]:
    """Return what /v1/models lists; nothing if the server has no such path, or fails there and its model is named."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            status, text = await _get(http, f"{server.url}/v1/models")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if time.monotonic() >= deadline:
                raise BenchError(
                    f"{server.name}: no server answers at {server.url} ({_reason(error)}). Start one "
                    "(`pagewise serve`), or wait for one that is loading with --ready-check-timeout-sec 600"
                ) from error
        else:
            if status != 503 or time.monotonic() >= deadline:
                break
        await asyncio.sleep(0.5)
    _check_key(server, status)
    if status == 404 or (server.model and status != 200):
        return []
    if status != 200:
        raise BenchError(
            f"{server.name}: {server.url}/v1/models answers {status}: {text[:200]}. Name a model with --model to go on "
            "without that list"
        )
    try:
        listed = json.loads(text)["data"]
        return [model for model in listed if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{server.name}: {server.url} is no OpenAI-compatible server: /v1/models is {text[:100]!r}"
        ) from error


def _choose_model(server: Server, models: list[dict[str, Any]]) -> None:
    names = [model["id"] for model in models]
    if not server.model:
        if not names:
            raise BenchError(f"{server.name} has no list of models (/v1/models): name one with --model")
        server.model = names[0]
    limit = next((model.get("max_model_len") for model in models if model["id"] == server.model), None)
    server.max_model_len = limit if isinstance(limit, int) else None


async def _probe(client: Client, models: list[str]) -> Outcome:
    """Send a short request; what the server refuses by name is left out from then on.

    ``models``: what the server lists. It may serve others: some servers list what they have downloaded.
    """
    server = client.server
    prompt = prompt_of(server, "Count: one two three four five six seven eight nine")
    while True:
        outcome = await client.send(prompt, _PROBE_TOKENS)
        if not outcome.error:
            return outcome
        said = f"{outcome.error}: {outcome.detail}"
        refused = outcome.error in ("HTTP 400", "HTTP 422")
        if refused and server.ignores_eos and "ignore_eos" in outcome.detail:
            server.ignores_eos = False
        elif refused and server.streams_usage and "stream_options" in outcome.detail:
            server.streams_usage = False
        elif refused and server.length_field == "max_tokens" and "max_completion_tokens" in outcome.detail:
            server.length_field = "max_completion_tokens"
        elif models and server.model not in models and outcome.error in ("HTTP 400", "HTTP 404"):
            listed = ", ".join(models)
            raise BenchError(
                f"{server.name} has no model {server.model!r}. /v1/models lists: {listed}. It says: {said}"
            )
        elif outcome.error == "HTTP 404":
            raise BenchError(f"{server.name} has no {server.endpoint} for {server.model!r}: {outcome.detail}")
        else:
            _check_key(server, int(outcome.error[5:]) if outcome.error.startswith("HTTP ") else 0)
            raise BenchError(f"{server.name}: a first request fails: {said}")


def _check_key(server: Server, status: int) -> None:
    if status in (401, 403):
        what = f"refuses the key in {server.key_variable}" if server.key else "wants an API key"
        raise BenchError(
            f"{server.name} {what} ({status}): set {server.key_variable}, or name another variable with --api-key-env"
        )


async def _version(http: aiohttp.ClientSession, server: Server) -> str | None:
    try:
        status, text = await _get(http, f"{server.url}/version")
        return str(json.loads(text)["version"])[:100] if status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.strerror:
        return error.strerror  # without what aiohttp was asked for
    return str(error) or type(error).__name__


async def _get(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with http.get(url, timeout=aiohttp.ClientTimeout(total=_SECONDS)) as answer:
        return answer.status, await answer.text(errors="replace")
