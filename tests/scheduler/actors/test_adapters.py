"""The registry of adapters over real sockets: what gateways are told, what executors try, and where requests go."""

from pathlib import Path

import pytest
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    Adapter,
    AdapterAnswer,
    AdapterLoaded,
    LoadAdapter,
    RegisterAdapter,
    Submit,
    UnregisterAdapter,
)

from tests.scheduler.actors.played_gateway import GREEDY, PlayedGateway, PlayedRequest, RefusedRequestError, prompts_of
from tests.scheduler.actors.stack import executor, gateway, joined, running, until

ONE = Adapter("one", "/adapters/one", b"1" * 32, 1000, 8)
OTHER = Adapter("one", "/adapters/other", b"2" * 32, 1000, 8)
BROKEN = Adapter("broken", "/adapters/broken", b"3" * 32, 1000, 8)


class Runner(SimulatedRunner):
    """Serves adapters, but for those that are called broken if ``fails``."""

    def __init__(self, *, fails: bool = False, max_loras: int = 1) -> None:
        config = ExecutorConfig(num_blocks=64, block_size=4, enable_lora=True, max_loras=max_loras)
        super().__init__(config)
        self.loaded: list[LoadAdapter] = []
        self._fails = fails

    def load_adapter(self, message: LoadAdapter) -> None:
        self.loaded.append(message)
        if self._fails and message.adapter.name == "broken":
            self._report(AdapterLoaded(message.epoch, message.number, error="the adapter 'broken' has no weights"))
        else:
            super().load_adapter(message)


async def register(
    played: PlayedGateway, adapter: Adapter, number: int = 1, *, replace: bool = False, waits: bool = False
) -> None:
    await played.send(RegisterAdapter(played.epoch, number, adapter, replace, waits))


async def answer(played: PlayedGateway, number: int = 1) -> AdapterAnswer:
    await until(lambda: number in played.adapter_answers)
    return played.adapter_answers.pop(number)


async def submit(played: PlayedGateway, adapter: Adapter | None, salt: str | None = None) -> PlayedRequest:
    stream = played._next
    prompts = prompts_of([[5, 6, 7, 8, 9]], 4)
    request = Submit(played.epoch, stream, f"r{stream}", prompts, GREEDY, cache_salt=salt, adapter=adapter)
    return await played.submit_as(request)


async def test_every_gateway_is_told_whichever_was_asked(tmp_path: Path) -> None:
    a, b = Runner(), Runner()
    async with running(tmp_path) as stack, executor(tmp_path, "a", runner=a), executor(tmp_path, "b", runner=b):
        await stack.ready(2)
        async with gateway(tmp_path, "second") as second:
            await register(stack.gateway, ONE)
            assert await answer(stack.gateway) == AdapterAnswer(1)
            assert stack.gateway.adapters.adapters == (ONE,), "whoever has asked knows it with the answer"
            await until(lambda: second.adapters.adapters == (ONE,))
            await register(second, OTHER, 2)
            assert (await answer(second, 2)).kind == "refused"
            await register(second, OTHER, 3, replace=True)
            assert await answer(second, 3) == AdapterAnswer(3)
            await until(lambda: stack.gateway.adapters.adapters == (OTHER,))
        async with gateway(tmp_path, "third") as third:
            await until(lambda: third.adapters.adapters == (OTHER,))
            await third.send(UnregisterAdapter(third.epoch, 4, "one"))
            assert await answer(third, 4) == AdapterAnswer(4)
            await until(lambda: stack.gateway.adapters.adapters == ())
            await third.send(UnregisterAdapter(third.epoch, 5, "one"))
            assert (await answer(third, 5)).kind == "unknown"


async def test_a_new_scheduler_takes_over_the_newest_state(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, runner=Runner()):
        await stack.ready(1)
        await register(stack.gateway, ONE)
        await answer(stack.gateway)
        older = stack.gateway.adapters
        await register(stack.gateway, OTHER, 2, replace=True)
        await answer(stack.gateway, 2)
        newer = stack.gateway.adapters
    assert newer.version > older.version
    (tmp_path / "next").mkdir()
    async with running(tmp_path / "next") as stack:
        for told in (newer, older):
            played = PlayedGateway(stack.coordinator.gateway_endpoint, f"version-{told.version}")
            played.adapters = told
            await played.join()
            await until(lambda: stack.gateway.adapters.adapters == (OTHER,))
            await until(lambda gateway=played: gateway.adapters.adapters == (OTHER,))  # type: ignore[misc]
            await played.close()


async def test_what_one_executor_cannot_load_is_not_served(tmp_path: Path) -> None:
    able, other = Runner(), Runner(fails=True)
    async with running(tmp_path) as stack, executor(tmp_path, "a", runner=able), executor(tmp_path, "b", runner=other):
        await stack.ready(2)
        await register(stack.gateway, BROKEN)
        refused = await answer(stack.gateway)
        assert (refused.kind, refused.message) == ("refused", "the adapter 'broken' has no weights")
        assert stack.gateway.adapters.adapters == ()
        assert stack.metric("lora_load_errors_total") == 1
        assert [load.slot for load in able.loaded] == [-1]
        await register(stack.gateway, ONE, 2)
        assert await answer(stack.gateway, 2) == AdapterAnswer(2)


async def test_without_executors_modules_of_the_start_wait_and_others_do_not(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        await register(stack.gateway, OTHER, 1)
        assert (await answer(stack.gateway, 1)).kind == "unavailable"
        await register(stack.gateway, ONE, 2, waits=True)
        async with executor(tmp_path, runner=Runner()):
            assert await answer(stack.gateway, 2) == AdapterAnswer(2)
            assert stack.gateway.adapters.adapters == (ONE,)


async def test_an_executor_that_goes_while_it_loads_says_nothing_of_the_adapter(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, _ = await joined(tmp_path, max_loras=1, max_lora_rank=16)
        await stack.ready(1)
        await register(stack.gateway, ONE, waits=True)
        while not isinstance(await raw.receive(), LoadAdapter):
            pass
        raw.close()
        async with executor(tmp_path, runner=Runner()):
            assert await answer(stack.gateway) == AdapterAnswer(1)


async def test_requests_go_where_their_adapter_can_be_served(tmp_path: Path) -> None:
    runner = Runner()
    async with running(tmp_path) as stack, executor(tmp_path, "plain"):
        await stack.ready(1)
        with pytest.raises(RefusedRequestError, match="no executor serves adapters"):
            await (await submit(stack.gateway, ONE)).result()
        plain = (await (await submit(stack.gateway, None)).result())[0]
        async with executor(tmp_path, "lora", runner=runner):
            await stack.ready(2)
            requests = [await submit(stack.gateway, one) for one in (ONE, OTHER, ONE)]
            outputs = [(await request.result())[0] for request in requests]
            assert outputs[0] == outputs[2]
            assert len({tuple(tokens) for tokens in (*outputs, plain)}) == 3
            assert {load.slot for load in runner.loaded} == {0}
            # Equal weights under another name share their KV, other weights do not.
            again = await submit(stack.gateway, Adapter("renamed", ONE.path, ONE.content, 1000, 8))
            assert (await again.result())[0] == outputs[0]
            assert again.started[0].cached_tokens == 4
            assert stack.metric("lora_loads_total") == len(runner.loaded)


@pytest.mark.parametrize(
    ("adapter", "salt"),
    [
        (None, "adapter:" + ONE.content.hex()),
        (Adapter("one", "/a", b"short", 1, 1), None),
        (Adapter("", "/a", b"1" * 32), None),
        (Adapter("one\n", "/a", b"1" * 32), None),
        (Adapter("one", "/a", b"1" * 32, -1), None),
    ],
)
async def test_adapters_that_cannot_be_are_refused(adapter: Adapter | None, salt: str | None, tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, runner=Runner()):
        await stack.ready(1)
        with pytest.raises(RefusedRequestError, match="adapter"):
            await (await submit(stack.gateway, adapter, salt)).result()
        if adapter is not None:
            await register(stack.gateway, adapter)
            assert (await answer(stack.gateway)).kind == "refused"
