"""Adapters as clients see them: their list, the rights to load them, and the requests submitted for them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from pagewise_gateway.main import main
from pagewise_shared.adapters import read_adapter

from tests.adapter_files import write_adapter
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, Server, serving

LORA: dict[str, Any] = {"enable_lora": True, "allow_runtime_lora_updating": True}
KEYS = "alice: sk-alice\nops: sk-ops operator=yes\n"


async def post(server: Server, path: str, key: str = "", **body: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with server.http.post(server.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def load(server: Server, path: Path, name: str = "one", key: str = "", **more: Any) -> tuple[int, str]:
    return await post(server, "/v1/load_lora_adapter", key, lora_name=name, lora_path=str(path), **more)


async def test_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    async with serving(FakeScheduler(), **LORA) as server:
        assert await load(server, folder) == (200, "Success: LoRA adapter 'one' added successfully.")
        listed = {model.id: model for model in (await server.openai.models.list()).data}
        assert (listed["one"].parent, listed["one"].root) == (MODEL, str(folder))  # type: ignore[attr-defined]
        assert listed[MODEL].parent is None  # type: ignore[attr-defined]
        assert (await server.openai.models.retrieve("one")).id == "one"
        answer = await server.openai.completions.create(model="one", prompt="the fox", max_tokens=3)
        assert answer.model == "one"
        submitted = server.scheduler.last
        assert submitted.params.adapter is not None
        assert submitted.params.adapter.content == read_adapter("one", str(folder), 16).content
        assert submitted.params.cache_salt is None
        await server.openai.completions.create(model=MODEL, prompt="the fox", max_tokens=3)
        assert server.scheduler.last.params.adapter is None
        status, text = await post(server, "/v1/unload_lora_adapter", lora_name="one", lora_int_id=3)
        assert (status, text) == (200, "Success: LoRA adapter 'one' removed successfully.")
        for path in ("/v1/completions", "/tokenize"):
            status, text = await post(server, path, model="one", prompt="the fox")
            assert (status, "model_not_found" in text) == (404, True)


async def test_answers_of_every_api_name_the_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    async with (
        serving(FakeScheduler(), **LORA) as server,
        AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic,
    ):
        await load(server, folder)
        asked: dict[str, Any] = {"model": "one", "max_tokens": 3, "messages": [{"role": "user", "content": "the fox"}]}
        message = await anthropic.messages.create(**asked)
        assert message.model == "one"
        async with anthropic.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).model == "one"
        chat = await server.openai.chat.completions.create(**asked)
        assert chat.model == "one"
        response = await server.openai.responses.create(model="one", input="the fox", max_output_tokens=16)
        assert response.model == "one"
        async with server.openai.responses.stream(model="one", input="the fox", max_output_tokens=16) as events:
            assert (await events.get_final_response()).model == "one"
        assert {
            submit.params.adapter.name for submit in server.scheduler.submits if submit.params.adapter is not None
        } == {"one"}
        assert len(server.scheduler.submits) == 5


async def test_a_gateway_that_has_just_started_does_not_deny_adapters_that_it_was_not_told_of(tmp_path: Path) -> None:
    adapter = read_adapter("one", str(write_adapter(tmp_path / "one")), 16)
    async with serving(FakeScheduler(late_adapters=True), **LORA) as server:
        asked = asyncio.create_task(post(server, "/v1/completions", model="one", prompt="the fox", max_tokens=2))
        assert (await post(server, "/v1/completions", model=MODEL, prompt="the fox", max_tokens=2))[0] == 200
        assert not asked.done()
        server.scheduler.adapters["one"] = adapter
        await server.scheduler.tell_adapters()
        assert (await asked)[0] == 200
        assert (await post(server, "/v1/completions", model="two", prompt="the fox"))[0] == 404


async def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    async with serving(FakeScheduler(), **LORA) as server:
        for folder, status, said in [
            (tmp_path / "nothing", 404, "neither a directory nor a hub id"),
            (write_adapter(tmp_path / "dora", use_dora=True), 400, "DoRA"),
            (write_adapter(tmp_path / "large", rank=17), 400, "--max-lora-rank is 16"),
        ]:
            found = await load(server, folder)
            assert found[0] == status
            assert said in found[1]
        assert not server.scheduler.adapters
        folder = write_adapter(tmp_path / "one")
        assert (await load(server, folder, MODEL))[0] == 400
        assert (await load(server, folder))[0] == 200
        assert "is loaded already" in (await load(server, folder))[1]
        assert (await load(server, write_adapter(tmp_path / "two", fill=1), load_inplace=True))[0] == 200
        assert (await post(server, "/v1/load_lora_adapter", lora_name="x"))[0] == 400
        assert (await post(server, "/v1/unload_lora_adapter", lora_name="x"))[0] == 404


@pytest.mark.parametrize("missing", ["enable_lora", "allow_runtime_lora_updating"])
async def test_loading_has_to_be_allowed(missing: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    async with serving(FakeScheduler(), **{name: value for name, value in LORA.items() if name != missing}) as server:
        status, text = await load(server, folder)
        assert (status, "--" + missing.replace("_", "-") in text) == (403, True)
        assert (await post(server, "/v1/unload_lora_adapter", lora_name="one"))[0] == 403


async def test_only_operators_load_adapters(tmp_path: Path) -> None:
    folder, keys = write_adapter(tmp_path / "one"), tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    async with serving(FakeScheduler(), api_keys_file=str(keys), **LORA) as server:
        assert (await load(server, folder))[0] == 401
        status, text = await load(server, folder, key="sk-alice")
        assert (status, "operator=yes" in text) == (403, True)
        assert (await load(server, folder, key="sk-ops"))[0] == 200
        status, _ = await post(server, "/v1/completions", "sk-alice", model="one", prompt="the fox", max_tokens=2)
        assert status == 200
        assert server.scheduler.last.params.cache_salt == "key:alice"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora-modules", "one=ADAPTER"], "needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "one"], "is not NAME=PATH"),
        (["--enable-lora", "--lora-modules", "one=ADAPTER", "one=ADAPTER"], "two adapters are called 'one'"),
        (["--enable-lora", "--lora-modules", "pagewise-demo=ADAPTER"], "is the name of the model"),
        (["--enable-lora", "--lora-modules", "one=ADAPTER", "--max-lora-rank=2"], "--max-lora-rank is 2"),
        (["--enable-lora", "--lora-modules", "one=/nowhere"], "cannot be found"),
    ],
)
def test_modules_that_cannot_be_served_are_refused_at_the_start(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_adapter(tmp_path / "one"))
    argv = [option.replace("ADAPTER", folder) for option in options]
    try:
        code = main(["--port=0", "--scheduler=ipc:///nowhere/at/all", *argv])
    except SystemExit as exit_of_parser:
        code = int(str(exit_of_parser.code))
    assert code
    assert said in capsys.readouterr().err


async def test_only_operators_learn_in_which_folders_models_are(tmp_path: Path) -> None:
    folder, keys = write_adapter(tmp_path / "one"), tmp_path / "keys"
    keys.write_text(KEYS)
    async with serving(FakeScheduler(), api_keys_file=str(keys), **LORA) as server:
        await load(server, folder, key="sk-ops")
        for key, shown in (("sk-alice", "one"), ("sk-ops", str(folder))):
            client = server.openai.with_options(api_key=key)
            listed = {model.id: model for model in (await client.models.list()).data}
            assert listed["one"].root == (await client.models.retrieve("one")).root == shown  # type: ignore[attr-defined]
            if key == "sk-alice":
                assert listed[MODEL].root == MODEL  # type: ignore[attr-defined]
