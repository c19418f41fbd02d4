"""Drafts over real sockets: executors verify them, metrics count them, and clients get the same tokens as without."""

from pathlib import Path

import msgspec
import pytest
from pagewise_executor.runner import FinishedStep
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import StepPlan, StepResult, pack_int32s, unpack_int32s
from pagewise_shared.sampling import SamplingParams

from tests.drafting import draft_always
from tests.scheduler.server.stack import executor, int32s, joined, running, until

WORDS = [10, 11, 12, 13, 14]


class RepeatingRunner(SimulatedRunner):
    """Repeats the same five words again and again."""

    def _token(self, row: int, position: int) -> int:
        return WORDS[position % len(WORDS)]


class ProposingRunner(RepeatingRunner):
    """Has a draft model, whose drafts of three tokens are right but for every seventh token."""

    def __init__(self, config: ExecutorConfig, step_seconds: float = 0.0) -> None:
        super().__init__(config, step_seconds)
        self.info = msgspec.structs.replace(self.info, max_proposed=3)

    def execute(self, plan: StepPlan) -> FinishedStep:
        result = super().execute(plan).result()
        asked = unpack_int32s(plan.proposals).tolist()
        proposed = list[int]()
        for row, count in zip(asked[::2], asked[1::2], strict=True):
            held = self._batch.sequences[row]
            first = len(held.tokens) + len(held.sampled)
            proposed += [
                99 if position % 7 == 0 else self._token(row, position) for position in range(first, first + count)
            ]
        return FinishedStep(msgspec.structs.replace(result, proposed=pack_int32s(proposed)))


class BreakingRunner(RepeatingRunner):
    """Fails in every step with drafts."""

    def execute(self, plan: StepPlan) -> FinishedStep:
        if plan.drafts:
            raise RuntimeError("drafts break it")
        return super().execute(plan)


async def test_drafts_are_verified_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path, speculative_config="ngram:4") as stack:
        runner = RepeatingRunner(ExecutorConfig(num_blocks=64, block_size=4))
        async with executor(tmp_path, runner=runner):
            await stack.ready(1)
            request = await stack.gateway.submit(WORDS * 2, [5, *WORDS, 6, 7], max_tokens=37)
            first, second = await request.result()
            assert first == (WORDS * 8)[:37]
            assert second == (WORDS * 9)[3:40]
            drafts, drafted, accepted = (
                stack.metric(f"spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
            )
            assert drafts > 6
            assert 4 * drafts >= drafted >= accepted > 36
            assert stack.metric("generation_tokens_total") == 74
            sampling = SamplingParams(temperature=0, stop_token_ids=(13,), min_tokens=20)
            request = await stack.gateway.submit(WORDS * 2, sampling=sampling, max_tokens=37)
            assert await request.result() == [(WORDS * 8)[:24]]
            assert request.finished[0].reason == "stop"
            await stack.all_free()


async def test_drafts_that_an_executor_proposes_are_verified_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    async with running(tmp_path) as stack:
        runner = ProposingRunner(ExecutorConfig(num_blocks=64, block_size=4))
        async with executor(tmp_path, runner=runner):
            await stack.ready(1)
            request = await stack.gateway.submit(WORDS * 2, [5, *WORDS, 6, 7], max_tokens=40)
            assert await request.result() == [WORDS * 8, (WORDS * 9)[3:43]]
            drafts, accepted = (stack.metric(f"spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens"))
            assert 0 < drafts <= accepted, "how many depends on measured times"
            await stack.all_free()


@pytest.mark.parametrize("proposed", [b"123", int32s(5000), int32s(-2), int32s(1, 2)])
async def test_an_executor_that_proposes_no_tokens_has_to_join_again(
    tmp_path: Path, proposed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path, max_proposed=1)
        await stack.gateway.submit(WORDS * 2, max_tokens=40)
        plan = await raw.receive()
        assert isinstance(plan, StepPlan)
        assert plan.proposals
        await raw.send(StepResult(welcome.epoch, plan.step, int32s(10), proposed=proposed))
        await until(lambda: not stack.executors)
        raw.close()


async def test_requests_that_drafts_break_go_on_without(tmp_path: Path) -> None:
    runner = BreakingRunner(ExecutorConfig(num_blocks=64, block_size=16))
    async with running(tmp_path, speculative_config="ngram:4") as stack, executor(tmp_path, runner=runner):
        await stack.ready(1)
        requests = [await stack.gateway.submit(WORDS * 2, max_tokens=40) for _ in range(2)]
        for request in requests:
            assert await request.result() == [WORDS * 8]
        assert 1 <= stack.metric("step_errors_total") <= 2
        assert stack.metric("spec_decode_num_drafts_total") == 0


async def test_after_an_executor_has_died_in_a_draft_there_are_no_more_of_them(tmp_path: Path) -> None:
    async with running(tmp_path, speculative_config="ngram:4", executor_timeout=1.0) as stack:
        raw, welcome = await joined(tmp_path)
        request = await stack.gateway.submit(WORDS * 2, max_tokens=40)
        given = 0
        while isinstance(plan := await raw.receive(), StepPlan) and not plan.drafts:
            await raw.send(StepResult(welcome.epoch, plan.step, int32s(WORDS[given])))
            given += 1
        async with executor(tmp_path, runner=RepeatingRunner(ExecutorConfig(num_blocks=64, block_size=4))):
            assert await request.result() == [WORDS * 8]
            assert stack.metric("spec_decode_num_drafts_total") == 0
            assert await (await stack.gateway.submit(WORDS * 2, max_tokens=40)).result() == [WORDS * 8]
            assert stack.metric("spec_decode_num_drafts_total") > 0
        raw.close()


@pytest.mark.parametrize(("dies", "kind"), [(False, RepeatingRunner), (True, RepeatingRunner), (True, ProposingRunner)])
async def test_requests_with_drafts_go_on_at_another_executor(
    tmp_path: Path, dies: bool, kind: type[RepeatingRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    options = {"speculative_config": "ngram:4"} if kind is RepeatingRunner else {}
    async with running(tmp_path, **options, executor_timeout=1.0) as stack:

        def runner() -> RepeatingRunner:
            return kind(ExecutorConfig(num_blocks=64, block_size=4), step_seconds=0.02)

        async with executor(tmp_path, "first", runner=runner()) as first:
            await stack.ready(1)
            requests = [await stack.gateway.submit(WORDS * 2, max_tokens=150) for _ in range(2)]
            await until(lambda: stack.metric("spec_decode_num_accepted_tokens_total") > 30)
            async with executor(tmp_path, "second", runner=runner()):
                await stack.ready(2)
                before = stack.executors[1].scheduler.features.drafts.num_accepted_tokens
                if dies:
                    first.cancel()
                else:
                    stack.registry._leave(stack.executors[0], 20.0)
                for request in requests:
                    assert await request.result() == [WORDS * 30]
                if dies:  # with a draft of each in flight, perhaps, so that they get no more of them
                    assert await (await stack.gateway.submit(WORDS * 2, max_tokens=40)).result() == [WORDS * 8]
                (handle,) = stack.executors
                assert handle.executor_id == "second"
                assert handle.scheduler.features.drafts.num_accepted_tokens > before
                await stack.all_free()
