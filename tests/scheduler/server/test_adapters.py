"""The registry of adapters over real sockets: reports to gateways, trials by executors, and routes of requests."""

import asyncio
import functools
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from pagewise_executor.runner import BesideSteps, FinishedStep
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_shared.block_hash import adapter_salt, root_hash
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    MAX_ADAPTERS,
    Adapter,
    AdapterAnswer,
    AdapterCapacity,
    AdapterLoaded,
    AdapterState,
    Heartbeat,
    LoadAdapter,
    Message,
    RegisterAdapter,
    RequestParams,
    StepPlan,
    StepResult,
    Submit,
    UnregisterAdapter,
    pack_int32s,
)

from tests.scheduler.server.played_gateway import (
    GREEDY,
    FailedPromptError,
    PlayedGateway,
    PlayedRequest,
    RefusedRequestError,
    prompts_of,
)
from tests.scheduler.server.stack import RawExecutor, executor, executors_of, gateway, joined, until
from tests.scheduler.server.stack import running as running_scheduler

Kind = TypeVar("Kind", bound=Message)
running = functools.partial(running_scheduler, allow_runtime_lora_updating=True)

ONE = Adapter("one", "/adapters/one", b"1" * 32, 1000, 8)
OTHER = Adapter("one", "/adapters/other", b"2" * 32, 1000, 8)
BROKEN = Adapter("broken", "/adapters/broken", b"3" * 32, 1000, 8)


class Runner(SimulatedRunner):
    """Serves adapters, except the ones called broken if ``fails``; ``max_loras`` of 0: none at all.

    ``lends``: the endpoint at which others may fetch its blocks. ``roots``: of its computed blocks.
    """

    def __init__(
        self,
        step_seconds: float = 0.0,
        *,
        fails: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        lends: str = "",
    ) -> None:
        config = ExecutorConfig(
            num_blocks=64,
            block_size=4,
            enable_lora=max_loras > 0,
            max_loras=max(1, max_loras),
            max_lora_rank=max_lora_rank,
        )
        super().__init__(config, step_seconds)
        self.info = msgspec.structs.replace(self.info, block_endpoint=lends)
        self.loaded: list[LoadAdapter] = []
        self.roots: list[bytes] = []
        self._fails = fails

    def execute(self, plan: StepPlan) -> FinishedStep:
        self.roots += [new.root for new in plan.joined]
        return super().execute(plan)

    def handle(self, message: BesideSteps) -> None:
        if not isinstance(message, LoadAdapter):
            super().handle(message)
            return
        self.loaded.append(message)
        if self._fails and message.adapter.name == "broken":
            self._report(AdapterLoaded(message.epoch, message.number, error="the adapter 'broken' has no weights"))
        else:
            super().handle(message)


async def register(
    played: PlayedGateway, adapter: Adapter, number: int = 1, *, replace: bool = False, waits: bool = False
) -> None:
    await played.send(RegisterAdapter(played.epoch, number, adapter, replace, waits))


async def answer(played: PlayedGateway, number: int = 1) -> AdapterAnswer:
    await until(lambda: number in played.adapter_answers)
    return played.adapter_answers.pop(number)


def service(path: Path, runner: Runner) -> ExecutorService:
    """An executor that is to leave."""
    runner.info = msgspec.structs.replace(runner.info, max_num_seqs=4, max_num_batched_tokens=64)
    return ExecutorService(Worker(lambda: runner), executors_of(path), "leaves")


async def next_message(raw: RawExecutor, kind: type[Kind]) -> Kind:
    """The next message of a kind; others are dropped."""
    while not isinstance(message := await raw.receive(), kind):
        pass
    return message


async def next_load(raw: RawExecutor) -> LoadAdapter:
    return await next_message(raw, LoadAdapter)


async def beat(raw: RawExecutor, epoch: int) -> None:
    while True:
        await raw.send(Heartbeat(epoch))
        await asyncio.sleep(0.3)


async def submit(
    played: PlayedGateway, adapter: Adapter | None, salt: str | None = None, max_tokens: int = 4
) -> PlayedRequest:
    stream = played._next
    prompts = prompts_of([[5, 6, 7, 8, 9]], max_tokens)
    request = Submit(
        played.epoch, stream, f"r{stream}", prompts, RequestParams(GREEDY, cache_salt=salt, adapter=adapter)
    )
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


def adapters(*names: str) -> tuple[Adapter, ...]:
    return tuple(Adapter(name, f"/adapters/{name}", name.encode().ljust(32), 1000, 8) for name in names)


async def test_what_was_loaded_since_the_start_is_merged_with_what_is_taken_over(tmp_path: Path) -> None:
    """A gateway that has just started may join, and ask for its modules, before the one that knows all others."""
    one, two, three = adapters("one", "two", "three")
    fresh = Adapter("one", "/adapters/fresh", b"f" * 32, 1000, 8)
    async with running(tmp_path) as stack, executor(tmp_path, runner=Runner()):
        await stack.ready(1)
        await register(stack.gateway, fresh)
        await answer(stack.gateway)
        version = stack.gateway.adapters.version

        async def join(name: str, told: AdapterState) -> PlayedGateway:
            played = PlayedGateway(stack.coordinator.gateway_endpoint, name)
            played.adapters = told
            await played.join()
            return played

        def known() -> list[Adapter]:
            return sorted(stack.gateway.adapters.adapters, key=lambda adapter: adapter.name)

        late = await join("late", AdapterState(0, version - 1000, (one, two)))
        await until(lambda: known() == [fresh, two])
        await until(lambda: late.adapters.adapters == stack.gateway.adapters.adapters)
        later = await join("later", AdapterState(0, version - 500, (one, two, three)))
        await until(lambda: known() == [fresh, three, two])
        await late.send(UnregisterAdapter(late.epoch, 2, "two"))
        await answer(late, 2)
        # Neither older reports nor this scheduler's own reports change anything, and no answer comes.
        for name, told in (
            ("older", AdapterState(0, version - 700, (two,))),
            ("own", AdapterState(0, version, (fresh, two))),
            ("last", AdapterState(0, version - 400, (one, two, three))),
        ):
            played = await join(name, told)
            await until(lambda gateway=played: gateway.adapters.version >= version)  # type: ignore[misc]
            await played.close()
            assert known() == [fresh, three]
        for played in (late, later):
            await played.close()


async def test_no_more_adapters_are_served_than_can_be_told(tmp_path: Path) -> None:
    """Also if two of them are loaded at once, or some are taken over later."""
    many = adapters(*(f"many-{number}" for number in range(MAX_ADAPTERS)))
    async with running(tmp_path) as stack:
        played = PlayedGateway(stack.coordinator.gateway_endpoint, "full")
        played.adapters = AdapterState(0, 5, many[:-1])
        await played.join()
        raw, welcome = await joined(tmp_path, adapters=AdapterCapacity(1, 16))
        for number, name in enumerate(("first", "second")):
            await register(stack.gateway, adapters(name)[0], number)
        for load in [await next_load(raw), await next_load(raw)]:
            await raw.send(AdapterLoaded(welcome.epoch, load.number))
        answers = [await answer(stack.gateway, number) for number in range(2)]
        assert [one.kind for one in answers] == ["", "refused"]
        assert answers[1].message == f"{MAX_ADAPTERS} adapters are the most that are served"
        other = PlayedGateway(stack.coordinator.gateway_endpoint, "newer")
        other.adapters = AdapterState(0, 6, many)
        await other.join()
        await until(lambda: len(other.adapters.adapters) == MAX_ADAPTERS and other.adapters.version > 6)
        assert "first" in {one.name for one in other.adapters.adapters}
        for each in (played, other):
            await each.close()
        raw.close()


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


async def test_modules_of_the_start_wait_for_an_executor_that_serves_adapters_like_them(tmp_path: Path) -> None:
    small, large = Runner(max_lora_rank=4), Runner(max_lora_rank=8)
    async with running(tmp_path) as stack, executor(tmp_path, "plain", runner=Runner(max_loras=0)):
        await stack.ready(1)
        await register(stack.gateway, ONE, 1, waits=True)
        await register(stack.gateway, OTHER, 2)
        refused = await answer(stack.gateway, 2)
        assert (refused.kind, "no executor serves adapters of rank 8" in refused.message) == ("refused", True)
        async with executor(tmp_path, "small", runner=small):
            await stack.ready(2)
            assert 1 not in stack.gateway.adapter_answers
            async with executor(tmp_path, "large", runner=large):
                assert await answer(stack.gateway, 1) == AdapterAnswer(1)
                assert stack.gateway.adapters.adapters == (ONE,)
                assert small.loaded == []
                await (await submit(stack.gateway, ONE)).result()
                assert small.loaded == []


async def test_what_only_the_executor_that_leaves_can_compute_goes_on_there(tmp_path: Path) -> None:
    leaving = service(tmp_path, Runner(0.02))
    async with running(tmp_path) as stack, executor(tmp_path, "plain", runner=Runner(max_loras=0)):
        served = asyncio.create_task(leaving.run())
        await stack.ready(2)
        request = await submit(stack.gateway, ONE, max_tokens=30)
        await request.until_tokens(1)
        leaving.leave("the test says so")
        assert len((await request.result())[0]) == 30
        await served
        assert stack.metrics.request_moves("left")._value.get() == 0


async def test_nobody_computes_without_an_adapter_what_one_that_leaves_has_cached_with_it(tmp_path: Path) -> None:
    """Executors compute the parts of a cache to copy that they cannot fetch."""
    leaving, plain = (
        service(tmp_path, Runner(lends="tcp://127.0.0.1:1")),
        Runner(max_loras=0, lends="tcp://127.0.0.1:2"),
    )
    async with running(tmp_path, recovery="recompute") as stack:
        served = asyncio.create_task(leaving.run())
        await stack.ready(1)
        for adapter in (ONE, None):
            await (await submit(stack.gateway, adapter)).result()
        async with executor(tmp_path, "plain", runner=plain):
            await stack.ready(2)
            leaving.leave("the test says so")
            await served
        roots = [root_hash("simulated", salt) for salt in (None, adapter_salt(ONE.content, None))]
        assert [root in plain.roots for root in roots] == [True, False]


async def test_a_load_that_hangs_fails_who_waits_for_it_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, step_timeout=0.5) as stack:
        raw, welcome = await joined(tmp_path, adapters=AdapterCapacity(1, 16))
        beating = asyncio.create_task(beat(raw, welcome.epoch))
        await stack.ready(1)
        await register(stack.gateway, ONE)
        waiting = await submit(stack.gateway, OTHER)
        load = await next_load(raw)
        refused = await answer(stack.gateway)
        assert refused.kind == "refused"
        assert refused.message == "the adapter 'one' has not been loaded within 1 s"
        with pytest.raises(
            FailedPromptError, match="the adapter 'one' cannot be loaded: the executor has not reported"
        ):
            await waiting.result()
        assert stack.metric("lora_load_errors_total") == 2
        # The executor is there still, and is asked for no other load until that one has returned.
        plain = await submit(stack.gateway, None, max_tokens=1)
        plan = await next_message(raw, StepPlan)
        await raw.send(StepResult(welcome.epoch, plan.step, pack_int32s([7])))
        assert (await plain.result())[0] == [7]
        with pytest.raises(FailedPromptError, match="cannot be loaded"):
            await (await submit(stack.gateway, OTHER)).result()
        async with executor(tmp_path, "other", runner=Runner()):
            await stack.ready(2)
            for _ in range(3):
                await (await submit(stack.gateway, OTHER)).result()
        await stack.ready(1)
        for number in (load.number, load.number + 1):
            await raw.send(AdapterLoaded(welcome.epoch, number))
        (handle,) = stack.executors
        await until(lambda: handle.scheduler.features.adapters.can_take(OTHER))
        after = await submit(stack.gateway, OTHER, max_tokens=1)
        load = await next_load(raw)
        assert (load.adapter, load.slot) == (OTHER, 0)
        await raw.send(AdapterLoaded(welcome.epoch, load.number))
        plan = await next_message(raw, StepPlan)
        await raw.send(StepResult(welcome.epoch, plan.step, pack_int32s([8])))
        assert (await after.result())[0] == [8]
        beating.cancel()
        raw.close()


async def test_an_executor_that_goes_while_it_loads_says_nothing_of_the_adapter(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, _ = await joined(tmp_path, adapters=AdapterCapacity(1, 16))
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


async def test_a_gateway_alone_brings_no_adapter_that_the_scheduler_does_not_name(tmp_path: Path) -> None:
    """Executors read whatever path an adapter has, and one may take another's name: a gateway's key is not enough."""
    runner = Runner()
    elsewhere = Adapter("elsewhere", ONE.path, ONE.content, 1000, 8)
    async with (
        running_scheduler(tmp_path, lora_modules=("one=/adapters/one",)) as stack,
        executor(tmp_path, runner=runner),
        gateway(tmp_path, "attacker", AdapterState(0, 2**40, (OTHER, elsewhere))) as attacker,
    ):
        await stack.ready(1)
        assert stack.coordinator.registry.state(0).adapters == ()
        for number, adapter in enumerate((OTHER, elsewhere, BROKEN), 1):
            await register(attacker, adapter, number, replace=True)
            told = await answer(attacker, number)
            assert told.kind == "refused"
            assert f"neither with --lora-modules {adapter.name}={adapter.path} nor with" in told.message
            with pytest.raises(RefusedRequestError, match="an adapter that is not allowed"):
                await (await submit(attacker, adapter)).result()
        await attacker.send(UnregisterAdapter(attacker.epoch, 9, "one"))
        assert (await answer(attacker, 9)).kind == "refused"
        assert runner.loaded == []
        assert stack.coordinator.registry.state(0).adapters == ()
        await register(stack.gateway, ONE, replace=True)
        assert (await answer(stack.gateway)).kind == ""
        assert len((await (await submit(stack.gateway, ONE)).result())[0]) == 4
