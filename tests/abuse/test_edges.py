"""Requests at the edge of every limit that ``/openapi.json`` states, beside another key's stream.

hypothesis makes a request that stalls the stream smaller until it does not: the example that is shown is a small one.
"""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import EXECUTOR, Served
from tests.abuse.bystander import ABUSER, BYSTANDER, Bystander, Serve, streaming
from tests.free_cores import FreeCores
from tests.fuzz.effort import EFFORT, examples

pytestmark = pytest.mark.timeout(600 * EFFORT)

_MODEL = "pagewise-demo"
_LONGEST_GAP = 1.0
_TRIES = 3
_MOST_TEXT, _MOST_ITEMS = 200_000, 20_000
"""Limits of texts and lists that have none of their own."""
_MOST_BYTES = 3_000_000
"""Of a list or an object: a body may be a little more."""
_HANGS_UP, _PATIENCE = 1.5, 6.0
"""Seconds after which the client closes the connection of any request: most of the time, and now and then."""
_ENDPOINTS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/messages/count_tokens": "CountRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
}


def schema_of(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, with the one in its place that it refers to."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def repeated(some: list[Any], size: int) -> list[Any]:
    """``size`` items, or as many as a body has room for."""
    size = min(size, _MOST_BYTES * len(some) // len(json.dumps(some)))
    return (some * (size // len(some) + 1))[:size]


def edges(document: dict[str, Any], schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema, most of them as small or as large as it allows."""
    schema = schema_of(document, schema)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of([edges(document, one) for one in schema[key] if one.get("type") != "null"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        return st.one_of([edges(document, {**schema, "type": one}) for one in kind if one != "null"])
    if kind == "boolean":
        return st.booleans()
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 2**31 - 1)
        return st.sampled_from([low, high, max(low, min(high, 1)), max(low, min(high, 128))])
    if kind == "string":
        low, high = schema.get("minLength", 0), schema.get("maxLength", _MOST_TEXT)
        letters = st.sampled_from(["a", "\\", "{", "\u00e9", "\U0001f600", " ", "ab"])
        sizes = st.sampled_from([low, high, min(high, 1000)])
        return st.builds(lambda letter, size: (letter * size)[:size], letters, sizes)
    if kind == "array" and "prefixItems" in schema:
        return st.tuples(*(edges(document, one) for one in schema["prefixItems"])).map(list)
    if kind == "array":
        low, high = schema.get("minItems", 0), schema.get("maxItems", _MOST_ITEMS)
        # The same few items again and again: making each of them would take longer than the request.
        items = st.lists(edges(document, schema.get("items", {})), min_size=1, max_size=2)
        sizes = st.sampled_from([low, min(high, 2), min(high, 100), high])
        return st.builds(lambda some, size: repeated(some, max(low, size)), items, sizes)
    return objects(document, schema)


@st.composite
def objects(draw: st.DrawFn, document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Objects of a schema, with its required fields and some of the rest."""
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    names = required | draw(st.sets(st.sampled_from(sorted(properties)), max_size=10)) if properties else required
    found = {name: draw(edges(document, properties[name])) for name in sorted(names)}
    if "model" in found:
        found["model"] = _MODEL
    if not properties and schema.get("additionalProperties", True) is not False:
        more = schema.get("additionalProperties")
        value = (
            draw(edges(document, more)) if isinstance(more, dict) else draw(st.sampled_from([0, "x", [[]], {"a": 1}]))
        )
        count = draw(st.sampled_from([0, 10, schema.get("maxProperties", _MOST_ITEMS)]))
        count = min(count, _MOST_BYTES // len(json.dumps(value)))
        found |= {str(number): value for number in range(count)}
    return found


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("edges")
    with serve(folder, "--simulate", "--executors", "2", "--max-model-len", "4096") as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Served) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {ABUSER}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.fixture(scope="module")
def bystander(server: Served) -> Iterator[Bystander]:
    with streaming(server, BYSTANDER) as found:
        yield found


def send(server: Served, path: str, body: bytes, patience: float = _HANGS_UP) -> int:
    """Send a request, read its response, and hang up after a while. Returns the status, 0 if none came until then."""
    target, deadline = urlsplit(server.url), time.monotonic() + patience
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=patience)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ABUSER}"}
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        while time.monotonic() < deadline and answer.read1(1 << 20):
            pass
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@st.composite
def products(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Requests whose limits multiply: prompts, outputs, tokens, log-probabilities, and repeated parts of outputs.

    A list of prompts stands as its number of prompts and of tokens in each, which a reader of a failure can see at a
    glance (``spelled_out``).
    """
    body: dict[str, Any] = {
        "n": draw(st.sampled_from([1, 8, 128])),
        "max_tokens": draw(st.sampled_from([1, 16, 200])),
        "ignore_eos": True,
        "stream": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
    }
    if body["stream"] and draw(st.booleans()):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if draw(st.booleans()):
        body |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
        return "/v1/chat/completions", body
    tokens = draw(st.sampled_from([1, 500, 3000]))
    body |= {"prompt": (draw(st.sampled_from([1, 4, 32])), tokens), "echo": draw(st.booleans())}
    if draw(st.booleans()):
        body["logprobs"] = 20
    return "/v1/completions", body


def spelled_out(body: dict[str, Any]) -> bytes:
    """The body of a request that ``products`` describes."""
    if "prompt" in body:
        prompts, tokens = body["prompt"]
        body = body | {"prompt": [list(range(1, 1 + tokens))] * prompts}
    return json.dumps(body).encode()


def test_the_limits_of_outputs_are_in_the_document(document: dict[str, Any]) -> None:
    for name in ("CompletionRequest", "ChatRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        for field in ("n", "best_of"):
            assert [kind.get("maximum") for kind in fields[field]["anyOf"]] == [128, None]


@examples(10)
@given(request=products(), at_once=st.sampled_from([1, 3]))
def test_no_product_of_limits_stalls_another_key(
    server: Served, bystander: Bystander, request: tuple[str, dict[str, Any]], at_once: int
) -> None:
    path, body = request
    check(server, bystander, path, spelled_out(body), at_once, _PATIENCE)


@examples(25)
@given(data=st.data())
def test_no_request_within_the_limits_stalls_another_key(
    server: Served, document: dict[str, Any], bystander: Bystander, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(_ENDPOINTS)), "path")
    body = data.draw(edges(document, document["components"]["schemas"][_ENDPOINTS[path]]), "body")
    at_once = data.draw(st.sampled_from([1, 4]), "at once")
    check(server, bystander, path, json.dumps(body).encode(), at_once, _HANGS_UP)


def send_at_once(server: Served, path: str, body: bytes, times: int, patience: float) -> list[int]:
    """Send a request so many times at once. Returns the statuses."""
    statuses: list[int] = []
    clients = [
        threading.Thread(target=lambda: statuses.append(send(server, path, body, patience))) for _ in range(times)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return statuses


def check(server: Served, bystander: Bystander, path: str, text: bytes, at_once: int, patience: float) -> None:
    """Send a request so many times at once; the bystander must not notice.

    Only a stall that comes again each time is the request's: others come from other work of this machine. For the same
    reason the bound is one for a machine without other work (see ``FreeCores``).
    """
    executors = server.pids(EXECUTOR)
    gaps: list[float] = []
    while not gaps or (gaps[-1] >= _LONGEST_GAP and len(gaps) < _TRIES):
        bystander.look()
        cores = FreeCores()
        statuses = send_at_once(server, path, text, at_once, patience)
        seen = bystander.look()
        gaps.append(seen.longest_gap * cores.share())
        assert seen.failures == ()
        assert not [status for status in statuses if status >= 500], statuses
    print(f"{min(gaps):.2f} s without a token")
    assert min(gaps) < _LONGEST_GAP, f"{gaps} s without a token"
    assert server.pids(EXECUTOR) == executors
    assert not [line for line in server.output if "Traceback" in line]
