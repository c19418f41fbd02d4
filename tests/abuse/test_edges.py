"""Requests at the edge of every limit that ``/openapi.json`` states, beside another key's stream.

What stalls the stream is made smaller by hypothesis until it does not: the example that is shown is a small one.
"""

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import EXECUTOR, Served
from tests.abuse.bystander import ABUSER, BYSTANDER, Bystander, serving_two_keys, streaming
from tests.fuzz.effort import EFFORT, examples

pytestmark = pytest.mark.timeout(600 * EFFORT)

_MODEL = "pagewise-demo"
_LONGEST_GAP = 1.0
_MOST_TEXT, _MOST_ITEMS = 200_000, 20_000
"""Of what has no limit of its own."""
_MOST_BYTES = 3_000_000
"""Of a list or an object: a body may be a little more."""
_HANGS_UP = 1.5
"""Seconds after which the client hangs up, whatever it asked for."""
_ENDPOINTS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
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
    if kind == "array":
        low, high = schema.get("minItems", 0), schema.get("maxItems", _MOST_ITEMS)
        # The same few items again and again: making each of them would take longer than what they do.
        items = st.lists(edges(document, schema.get("items", {})), min_size=1, max_size=2)
        sizes = st.sampled_from([low, min(high, 2), min(high, 100), high])
        return st.builds(lambda some, size: repeated(some, max(low, size)), items, sizes)
    return objects(document, schema)


@st.composite
def objects(draw: st.DrawFn, document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Objects of a schema, with what it requires and some of the rest."""
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("edges")
    with serving_two_keys(folder, "--simulate", "--executors", "2", "--max-model-len", "4096") as server:
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


def send(server: Served, path: str, body: bytes) -> int:
    """Send a request, and hang up after a while. Returns the status of the response, 0 if none came until then."""
    target = urlsplit(server.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=_HANGS_UP)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ABUSER}"}
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read(1 << 20)
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@examples(25)
@given(data=st.data())
def test_no_request_within_the_limits_stalls_another_key(
    server: Served, document: dict[str, Any], bystander: Bystander, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(_ENDPOINTS)), "path")
    body = data.draw(edges(document, document["components"]["schemas"][_ENDPOINTS[path]]), "body")
    at_once = data.draw(st.sampled_from([1, 4]), "at once")
    text = json.dumps(body).encode()
    executors = server.pids(EXECUTOR)
    bystander.look()
    statuses: list[int] = []
    clients = [threading.Thread(target=lambda: statuses.append(send(server, path, text))) for _ in range(at_once)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seen = bystander.look()
    assert seen.failures == ()
    assert seen.longest_gap < _LONGEST_GAP, f"{seen.longest_gap:.2f} s without a token"
    assert not [status for status in statuses if status >= 500], statuses
    assert server.pids(EXECUTOR) == executors
    assert not [line for line in server.output if "Traceback" in line]
