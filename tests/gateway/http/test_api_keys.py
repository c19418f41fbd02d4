"""API keys: admission, replacement of keys, and the rights of each. On real sockets."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from pagewise_gateway.http import credentials
from pagewise_gateway.http.access import make_keyring
from pagewise_gateway.http.credentials import (
    ANONYMOUS,
    Client,
    Keyring,
    digest_of,
    read_keys,
    read_variable,
)
from pagewise_gateway.metrics import Metrics
from pagewise_shared.block_hash import root_hash
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import DEVICE, DISK, HOST, KeyLimits, MemoryBudget, MemorySize

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, Server, serving

COMPLETION = "/v1/completions"
BODY = {"model": MODEL, "prompt": "the fox", "max_tokens": 4}
KEYS = """
# who may come in
alice: sk-alice-1   # her laptop
alice: sk-alice-2
bob    sk-bob  concurrent=1 tokens-per-minute=none
ops:   sk-ops operator=yes share=staff priority=-10
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def clients_of(text: str, usual: KeyLimits = KeyLimits()) -> dict[bytes, Client]:  # noqa: B008
    clients: dict[bytes, Client] = {}
    read_keys(text, "keys", Client("", usual), clients)
    return clients


def test_key_files() -> None:
    clients = clients_of(KEYS, KeyLimits(tokens_per_minute=10, requests_per_minute=7))
    assert clients[digest_of("sk-bob")].name == "bob"
    assert list(clients.values()) == [
        Client("alice", KeyLimits(None, 7, 10)),
        Client("alice", KeyLimits(None, 7, 10)),
        Client("bob", KeyLimits(1, 7, None)),
        Client("ops", KeyLimits(None, 7, 10), priority=-10, share="staff", operator=True),
    ]


def test_the_rights_behind_one_key_hold_for_all_keys_of_the_name() -> None:
    clients: dict[bytes, Client] = {}
    read_keys("alice: sk-1\nalice: sk-2 concurrent=3\nalice: sk-3", "a", Client(""), clients)
    assert list(clients.values()) == [Client("alice", KeyLimits(concurrent=3))] * 3
    read_keys("alice: sk-4 share=staff", "b", Client(""), clients)
    assert list(clients.values()) == [Client("alice", share="staff")] * 4


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("sk-secret", "NAME: KEY"),
        ("sk-secret concurrent=3", "NAME: KEY"),
        ("a/b: sk-secret", "NAME: KEY"),
        ("alice: sk-secret concurrent=0", "concurrent takes"),
        ("alice: sk-secret concurrent=many", "concurrent takes"),
        ("alice: sk secret", "what follows the key"),
        ("sk-secret operator=yes", "NAME: KEY"),
        ("alice: sk-secret operator", "operator takes"),
        ("alice: sk-secret operator=true", "operator takes"),
        ("alice: sk-secret priority=none", "priority takes"),
        ("alice: sk-secret priority=1", "priority takes"),
        ("alice: sk-secret priority=-2147483649", "priority takes"),
        ("alice: sk-secret share=", "share takes"),
        ("alice: sk-secret share=a/b", "share takes"),
        ("alice: sk-secret memory.min=2XB", "memory.min takes a size such as 2GiB, or a share"),
        ("alice: sk-secret memory.min=-1", "memory.min takes"),
        ("alice: sk-secret memory.min=2000TiB", "memory.min is more than 1024TiB"),
        (f"alice: sk-secret memory.min={'9' * 400}", "memory.min takes"),
        ("alice: sk-secret memory.low=120%", "memory.low is more than 100%"),
        ("alice: sk-secret memory.min=30% memory.high=20%", "min of the memory is more than high"),
        ("alice: sk-secret memory.host.low=2GiB memory.host.high=1GiB", "low of the memory is more than high"),
        ("alice: sk-secret memory.redis.min=1GiB", "memory.redis.min: only the device"),
        ("alice: sk-secret memory.store.high=1GiB", "because a store evicts blocks by itself"),
        ("alice: sk-secret memory.disk.min=2% memory.disk.high=1%", "min of the memory is more than high"),
        ("alice: sk-secret memory.max=1GiB", "what follows the key"),
        ("alice: sk-secret\nbob: sk-secret", "line 2: the key of bob"),
        ("alice: sk-secret concurrent=1\nalice: sk-other concurrent=2", "set already, in keys, line 1"),
    ],
)
def test_lines_that_cannot_be_understood_are_named_and_not_shown(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        clients_of(line)
    assert named in str(error.value)
    assert "keys, line" in str(error.value)
    assert "secret" not in str(error.value)


def test_budgets_of_memory() -> None:
    lines = (
        "a: sk-a memory.min=1.5GiB memory.high=20% memory.host.low=512MB memory.low=0 memory.disk.high=3%",
        "b: sk-b share=team",
        "c: sk-c share=team memory.min=50%",
    )
    keyring = Keyring(",".join(lines), None, KeyLimits(), Metrics("m"))
    clients = {client.name: client for client in filter(None, map(keyring.find, ("sk-a", "sk-b", "sk-c")))}
    assert clients["a"].memory == (
        MemoryBudget(DEVICE, MemorySize(3 << 29), MemorySize(), MemorySize(share=0.2)),
        MemoryBudget(HOST, low=MemorySize(512_000_000)),
        MemoryBudget(DISK, high=MemorySize(share=0.03)),
    )
    assert clients["b"].memory == clients["c"].memory == (MemoryBudget(DEVICE, MemorySize(share=0.5)),)
    assert clients["b"].owner == "group:team"
    whole = [f"k{number}: sk-{number} memory.min={share}%" for number, share in enumerate((4, 3, 20, 8, 8, 1, 2, 4))]
    assert Keyring(",".join(whole), None, KeyLimits(), Metrics("m")).find("sk-0"), "a sum of floats may be above 50%"


@pytest.mark.parametrize(
    ("lines", "share_cache", "named"),
    [
        ("a: sk-a memory.min=30%, b: sk-b memory.min=30%", False, "on the device are 60% together, at most 50%"),
        ("a: sk-a memory.host.min=51%", False, "on the host are 51% together"),
        (
            "a: sk-a share=t memory.min=1%, b: sk-b share=t memory.low=1%",
            False,
            "of group:t are in the lines of a and b",
        ),
        ("a: sk-a memory.min=1%", True, "with --share-cache all keys have one cache"),
    ],
)
def test_budgets_that_contradict_each_other_are_refused_at_the_start(lines: str, share_cache: bool, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Keyring(lines, None, KeyLimits(), Metrics("m"), share_cache=share_cache)


async def test_budgets_go_to_the_scheduler_with_each_request() -> None:
    async with serving(api_keys="a: sk-a memory.min=10%") as server:
        assert await status_of(server, "sk-a") == 200
        assert server.scheduler.last.memory == (MemoryBudget(DEVICE, MemorySize(share=0.1)),)


def test_keys_in_the_environment() -> None:
    clients: dict[bytes, Client] = {}
    read_variable("alice:sk-1, bob: sk-2", "VARIABLE", Client(""), clients)
    read_variable("sk-3\n", "VARIABLE", Client(""), clients)
    assert list(clients.values()) == [Client("alice"), Client("bob"), Client("default", operator=True)]


async def test_a_single_key_without_a_name_is_the_owner_s(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for keys, key, status in (
        ("sk-1", "sk-1", 200),
        ("a: sk-1", "sk-1", 403),
        ("a: sk-1, b: sk-2 operator=yes", "sk-2", 200),
    ):
        async with serving(api_keys=keys) as server:
            for path in ("/metrics", "/debug/memory"):
                async with server.http.get(server.url + path, headers=bearer(key)) as response:
                    assert response.status == status
    shown = [line.partition("shown to ")[2] for line in caplog.messages if "shown to" in line]
    assert shown == ["default", "none of them: write operator=yes behind a key", "b"]
    assert "sk-" not in caplog.text


def test_limits_without_keys_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--api-keys-file"):
        make_keyring(GatewayConfig(key_concurrent=3), Metrics("m"))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_keyring(GatewayConfig(api_keys_file="/nowhere"), Metrics("m"))


def test_keys_are_found_by_digests_that_nobody_else_can_make(key_file: Path) -> None:
    keyring = Keyring(None, str(key_file), KeyLimits(), Metrics("m"))
    for key, name in (("sk-alice-1", "alice"), ("sk-bob", "bob"), ("nobody", None), ("sk-\udcff", None)):
        found = keyring.find(key)
        assert (found and found.name) == name
    code = "from pagewise_gateway.http.credentials import digest_of; print(digest_of('sk-bob').hex())"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert len(digest_of("sk-bob")) == 32
    assert output.strip() != digest_of("sk-bob").hex()


def test_as_many_keys_as_there_may_be() -> None:
    lines = "\n".join(f"client{number % 100}: sk-{number}" for number in range(10_000))
    assert len(clients_of(lines)) == 10_000
    with pytest.raises(ConfigError, match="more than 10000 keys"):
        clients_of(lines + "\nmore: sk-more")


@pytest.mark.parametrize("path", ["/v1/models", "/debug/memory", "/metrics", "/openapi.json", "/nowhere"])
async def test_what_needs_a_key(path: str, key_file: Path) -> None:
    async with serving(api_keys_file=str(key_file)) as server:
        for headers in (
            {},
            bearer("wrong"),
            bearer(""),
            {"Authorization": "Basic sk-bob"},
            {"Authorization": "sk-bob"},
        ):
            async with server.http.get(server.url + path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        async with server.http.get(server.url + path, headers=bearer("sk-ops")) as response:
            assert response.status == (404 if path == "/nowhere" else 200)
        assert 'http_unauthorized_total{model_name="fake/model"} 5.0' in server.shown()


@pytest.mark.parametrize("path", ["/health", "/version"])
async def test_probes_need_none(path: str, key_file: Path) -> None:
    async with serving(api_keys_file=str(key_file)) as server:
        assert (await server.get(path))[0] == 200


async def test_metrics_are_public_if_they_are_said_to_be(key_file: Path) -> None:
    async with (
        serving(api_keys_file=str(key_file), public_metrics=True) as server,
        server.http.get(server.url + "/metrics") as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize("path", ["/debug/memory", "/debug/cache", "/metrics"])
async def test_what_needs_an_operator_s_key(path: str, key_file: Path) -> None:
    async with serving(api_keys_file=str(key_file)) as server:
        async with server.http.get(server.url + path, headers=bearer("sk-bob")) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (403, "permission_denied")
            assert "'bob' is not an operator's: put operator=yes in its line" in error["message"]
            assert ("--public-metrics" in error["message"]) == (path == "/metrics")
        async with server.http.get(server.url + path, headers=bearer("sk-ops")) as response:
            assert response.status == 200
        assert [query.key for query in server.scheduler.queries] == [""], "what is refused is not asked for"
    async with serving() as server:
        assert (await server.http.get(server.url + path)).status == 200


async def test_operators_reset_the_cache(key_file: Path) -> None:
    async with serving(api_keys_file=str(key_file)) as server:
        path, ops = "/reset_prefix_cache", bearer("sk-ops")
        assert (await server.post(path, {}, **bearer("sk-bob")))[0] == 403
        for query, body in (
            ("", None),
            ("?salt=group:g/x", None),
            ("?key=bob", None),
            ("", {"salt": "all"}),
            ("", {"key": "alice", "reset_external": False}),
            ("", {"key": "alice", "reset_external": True}),
        ):
            async with server.http.post(server.url + path + query, json=body, headers=ops) as response:
                assert (response.status, await response.json()) == (200, {"executors": []})
        salts = ["", "group:g/x", "key:bob", "all", "key:alice", "key:alice"]
        assert server.scheduler.resets == [(salt, number == 5) for number, salt in enumerate(salts)]
        deep = {"salt": "/".join("a" * 31), "reset_external": True}
        for wrong in ({"salt": "a", "key": "b"}, {"salt": ""}, {"reset_running_requests": True}, {"sault": "a"}, deep):
            assert (await server.post(path, wrong, **ops))[0] == 400
        assert (await server.http.post(server.url + path + "?sault=a", headers=ops)).status == 400
        assert (await server.post(path + "?key=bob", {}, **ops))[0] == 400, "else the caches of all keys were reset"
        assert len(server.scheduler.resets) == 6
        async with server.http.get(server.url + "/debug/cache?key=bob&limit=x", headers=ops) as response:
            assert response.status == 400


async def test_clients_see_their_own_requests_by_either_id(key_file: Path) -> None:
    async with serving(api_keys_file=str(key_file)) as server:
        server.scheduler.reports = {("request", "mine/1"): b'{"sequences":[]}', ("request", "cmpl-7"): b"{}"}
        for name in ("mine%2F1", "mine/1", "cmpl-7", "unknown", "x" * 300):
            async with server.http.get(f"{server.url}/debug/requests/{name}", headers=bearer("sk-bob")) as response:
                assert response.status == (404 if name[0] in "ux" else 200), name
                assert len(await response.read()) < 400
        asked = [(query.argument, query.key) for query in server.scheduler.queries]
        assert asked == [("mine/1", "bob"), ("mine/1", "bob"), ("7", "bob"), ("cmpl-7", "bob"), ("unknown", "bob")]
        for key, limit, status in (("sk-bob", 1001, 400), ("sk-bob", 1000, 200), ("sk-ops", 10_000, 200)):
            url = f"{server.url}/debug/requests/mine%2F1?limit={limit}"
            async with server.http.get(url, headers=bearer(key)) as response:
                assert response.status == status
        assert server.scheduler.queries[-1].key == "", "operators see the requests of all keys"


async def test_the_scheduler_is_told_a_client_s_own_id() -> None:
    async with serving() as server:
        for sent, told in (("job 1", ""), ("job-1", "job-1"), ("x" * 129, ""), (None, "")):
            headers = {} if sent is None else {"X-Request-Id": sent}
            assert (await server.post(COMPLETION, BODY, **headers))[0] == 200
            assert server.scheduler.last.params.client_request_id == told
            assert server.scheduler.last.request_id not in ("", told)


@pytest.mark.parametrize("path", [COMPLETION, "/v1/chat/completions"])
async def test_priorities_have_a_bound_for_each_key(path: str, key_file: Path) -> None:
    body = BODY if path == COMPLETION else {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}
    async with serving(api_keys_file=str(key_file)) as server:
        for key, priority, allowed in (
            ("sk-bob", 0, True),
            ("sk-bob", 2**31 - 1, True),
            ("sk-bob", -1, False),
            ("sk-bob", -(2**31), False),
            ("sk-ops", -10, True),
            ("sk-ops", -11, False),
        ):
            status, answer = await server.post(path, body | {"priority": priority}, **bearer(key))
            assert status == (200 if allowed else 400)
            if allowed:
                assert server.scheduler.last.params.priority == priority
            else:
                error: Any = answer["error"]
                bound = {"sk-bob": "'bob' may ask for is 0", "sk-ops": "'ops' may ask for is -10"}[key]
                assert bound in error["message"]
                assert error["param"] == "priority"
    async with serving() as server:
        assert (await server.post(path, body | {"priority": -(2**31)}))[0] == 200, "without keys everything is allowed"


async def test_keys_have_caches_of_their_own_unless_they_share(tmp_path: Path) -> None:
    keys = "a:1,a:2,b:3,c:4 share=team,d:5 share=team,team:6"

    async def salts(**options: Any) -> list[str | None]:
        async with serving(**options) as server:
            found = []
            for key in "123456":
                for given in (None, "x"):
                    body = BODY if given is None else BODY | {"cache_salt": given}
                    assert (await server.post(COMPLETION, body, **bearer(key)))[0] == 200
                    found.append(server.scheduler.last.params.cache_salt)
            return found

    own = await salts(api_keys=keys)
    assert own == await salts(api_keys=keys), "the same at all gateways, and after restarts"
    assert own[:2] == own[2:4], "the keys of one name share"
    assert own[6:8] == own[8:10], "the keys of one group share"
    assert len(set(own)) == 8, "nobody else does, and what clients give separates further"
    for options in ({"api_keys": keys, "share_cache": True}, {}):
        shared = await salts(**options)
        assert len(set(shared)) == 2
        assert not set(shared) & set(own)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
CLIENTS = st.one_of(
    st.just(ANONYMOUS),
    st.builds(Client, NAMES, share=NAMES | st.just(""), shares=st.booleans()),
)
GIVEN = (
    st.none()
    | st.text(min_size=1, max_size=12)
    | st.builds("{}:{}/{}".format, st.sampled_from(["key", "group"]), NAMES, NAMES)
)


@given(CLIENTS, GIVEN, CLIENTS, GIVEN)
def test_no_choice_of_a_salt_leads_into_the_cache_of_others(
    one: Client, given_one: str | None, other: Client, given_other: str | None
) -> None:
    def cache(client: Client) -> tuple[str, ...]:
        """The holder of its cache."""
        return () if client.shares else ("group", client.share) if client.share else ("key", client.name)

    same = (cache(one), given_one) == (cache(other), given_other)
    assert (one.cache_salt(given_one) == other.cache_salt(given_other)) == same
    salt = one.cache_salt(given_one)
    assert (root_hash("model", salt) == root_hash("model", other.cache_salt(given_other))) == same
    assert not salt or other.cache_salt(salt) != salt, "repeating another's salt does not help"


def test_a_key_file_that_others_can_read_is_warned_about_once(
    key_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)  # which another test may have set to less
    keyring = Keyring(None, str(key_file), KeyLimits(), Metrics("m"))
    assert caplog.text == ""
    for mode in (0o640, 0o604, 0o600):
        caplog.clear()
        key_file.chmod(mode)
        keyring = Keyring(None, str(key_file), KeyLimits(), Metrics("m"))
        key_file.write_text(key_file.read_text() + "\n")
        assert keyring.find("wrong") is None  # reads the file again
        assert caplog.text.count(f"chmod 600 {key_file}") == (mode != 0o600)
        assert "sk-" not in caplog.text


async def test_without_keys_everybody_comes_in() -> None:
    async with serving() as server:
        status, _ = await server.post(COMPLETION, BODY, Authorization="Bearer whatever")
        assert status == 200
        assert server.scheduler.last.params.key == ""


async def test_the_openai_client_and_what_is_told(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(api_keys_file=str(key_file), api_keys="carol:sk-carol") as server:
        for key, name in (("sk-alice-2", "alice"), ("sk-carol", "carol")):
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                await client.completions.create(model=MODEL, prompt="the fox", max_tokens=4)
            assert server.scheduler.last.params.key == name
        with pytest.raises(openai.AuthenticationError):
            await server.openai.completions.create(model=MODEL, prompt="the fox")
        shown = server.shown()
    assert "sk-" not in shown + caplog.text


async def status_of(server: Server, key: str) -> int:
    return (await server.post(COMPLETION, BODY, **bearer(key)))[0]


async def test_keys_are_replaced_without_a_restart(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)
    async with serving(api_keys_file=str(key_file)) as server:
        assert await status_of(server, "sk-alice-1") == 200
        fresh = key_file.with_name("fresh")
        fresh.write_text("alice: sk-alice-3\n")
        os.replace(fresh, key_file)
        assert [await status_of(server, key) for key in ("sk-alice-1", "sk-bob", "sk-alice-3")] == [401, 401, 200]
        for broken in ("sk-nameless", "", None):
            os.unlink(key_file)
            if broken is not None:
                fresh.write_text(broken)
                os.replace(fresh, key_file)
            assert await status_of(server, "sk-alice-3") == 200, "what cannot be read changes nothing"
        shown = server.shown()
    assert 'key_reloads_total{model_name="fake/model",outcome="done"} 1.0' in shown
    assert 'key_reloads_total{model_name="fake/model",outcome="failed"} 3.0' in shown
    assert caplog.text.count("the API keys stay as they were") == 3
    assert "sk-" not in caplog.text


async def test_the_scheduler_is_told_the_limits_of_a_key(key_file: Path) -> None:
    async with serving(api_keys_file=str(key_file), key_requests_per_minute=20, key_tokens_per_minute=9) as server:
        for key, name, limits in (
            ("sk-alice-1", "alice", KeyLimits(None, 20, 9)),
            ("sk-bob", "bob", KeyLimits(1, 20, None)),
        ):
            assert await status_of(server, key) == 200
            assert (server.scheduler.last.params.key, server.scheduler.last.limits) == (name, limits)


async def refusal(server: Server, key: str) -> tuple[int, str, int]:
    async with server.http.post(server.url + COMPLETION, json=BODY, headers=bearer(key)) as response:
        answer = await response.json()
        after = int(response.headers.get("Retry-After", 0))
        return response.status, answer.get("error", {}).get("message", ""), after


async def test_what_is_over_a_limit_is_refused_by_the_scheduler(key_file: Path) -> None:
    scheduler = FakeScheduler(refuse=("overloaded", "API key bob: too much", 17))
    async with serving(scheduler, api_keys_file=str(key_file)) as server:
        assert await refusal(server, "sk-bob") == (429, "API key bob: too much", 17)
        scheduler.refuse = None
        assert await status_of(server, "sk-bob") == 200


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "the fox"}), ("/detokenize", {"tokens": [5]})])
async def test_tokenizing_counts_against_limits(key_file: Path, path: str, body: dict[str, object]) -> None:
    async with serving(api_keys_file=str(key_file)) as server:
        status, _ = await server.post(path, body, **bearer("sk-alice-1"))
        assert (status, server.scheduler.submits) == (200, []), "alice has no limits"
        status, _ = await server.post(path, body, **bearer("sk-bob"))
        assert (status, server.scheduler.last.prompts, server.scheduler.last.params.key) == (200, (), "bob")
        await server.scheduler.until(lambda: server.scheduler.aborts)
        assert server.scheduler.aborts == [server.scheduler.last.stream]
        server.scheduler.refuse = ("overloaded", "too much", 3)
        status, _ = await server.post(path, body, **bearer("sk-bob"))
        assert status == 429
        assert (await server.post(path, body, **bearer("sk-alice-1")))[0] == 200
