"""Requests with grammars between a gateway and executors: executors that may serve them, and failures."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from pagewise_executor.runner import FinishedStep
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    CompileGrammar,
    GrammarCompiled,
    Heartbeat,
    Prompt,
    RequestParams,
    RowFailure,
    StepPlan,
    StepResult,
    Submit,
    Welcome,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from tests.scheduler.server.played_gateway import FailedPromptError, RefusedRequestError
from tests.scheduler.server.stack import RawExecutor, executor, joined, running, until

PROMPT = [7, *range(10, 20)]


def submit(grammar: str, max_tokens: int = 8, n: int = 1, prompts: int = 1) -> Submit:
    params = SamplingParams(temperature=0, grammar=grammar)
    asked = tuple(Prompt(pack_int32s([*PROMPT, number]), max_tokens) for number in range(prompts))
    return Submit(0, 0, "r", asked, RequestParams(params, n=n))


class FailingRunner(SimulatedRunner):
    """Follows grammars in all but their errors; grammars called "bad" fail with their third token."""

    def __init__(self, *, invalid: bool = False, no_grammars: str = "") -> None:
        super().__init__(ExecutorConfig(num_blocks=64, block_size=4))
        self.info = msgspec.structs.replace(self.info, no_grammars=no_grammars)
        self.invalid = invalid
        self.num_served = 0

    def execute(self, plan: StepPlan) -> FinishedStep:
        self.num_served += sum(bool(new.sampling.grammar) for new in plan.joined)
        chunks = [row for row, _ in plan.chunks]
        rows = [*self._batch._decoding, *chunks]
        step = super().execute(plan)
        rows = [row for row in rows if row in self._batch.sequences][: len(step.finished.tokens) // 4]
        failures = tuple(
            RowFailure(index, "it cannot go on", self.invalid)
            for index, row in enumerate(rows)
            if self._batch.sequences[row].sampling.grammar == "bad"
            and int(self._batch.num_computed[row]) >= self._batch.sequences[row].num_prompt_tokens + 2
        )
        return FinishedStep(msgspec.structs.replace(step.finished, failures=failures))


@pytest.mark.parametrize("invalid", [False, True])
async def test_a_sequence_that_cannot_go_on_fails_its_request_alone(tmp_path: Path, invalid: bool) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, runner=FailingRunner(invalid=invalid)):
        await stack.ready(1)
        good = await stack.gateway.submit_as(submit("good", 20))
        bad = await stack.gateway.submit_as(submit("bad", 20, n=2))
        with pytest.raises(FailedPromptError, match="it cannot go on") as failed:
            await bad.result()
        assert failed.value.kind == ("invalid" if invalid else "internal")
        assert all(len(tokens) <= 2 for tokens in bad.tokens), "none in the place of the one that failed"
        assert [len(tokens) for tokens in await good.result()] == [20]
        assert stack.metric("grammar_failures_total") == 1
        assert stack.metric("step_errors_total") == 0
        await stack.all_free()


async def test_executors_that_follow_no_grammars_get_none(tmp_path: Path) -> None:
    able, unable = FailingRunner(), FailingRunner(no_grammars="llguidance is not installed")
    async with running(tmp_path) as stack, executor(tmp_path, "unable", runner=unable):
        await stack.ready(1)
        with pytest.raises(RefusedRequestError, match="cannot be structured here: llguidance is not installed"):
            await (await stack.gateway.submit_as(submit("good"))).result()
        assert await (await stack.gateway.submit_as(submit(""))).result()
        async with executor(tmp_path, "able", runner=able):
            await stack.ready(2)
            asked = [await stack.gateway.submit_as(submit("good")) for _ in range(4)]
            await asyncio.gather(*(one.result() for one in asked))
        assert (able.num_served, unable.num_served) == (4, 0)


async def test_a_sequence_joins_when_its_grammar_is_compiled(tmp_path: Path) -> None:
    async with running(tmp_path, executor_timeout=20.0) as stack:
        raw, welcome = await joined(tmp_path, max_grammars=8)
        await stack.ready(1)
        bound = await stack.gateway.submit_as(submit("grammar", 1))
        while not isinstance(question := await raw.receive(), CompileGrammar):
            assert not isinstance(question, StepPlan)
        assert (question.epoch, question.grammar) == (welcome.epoch, "grammar")
        plain = await stack.gateway.submit_as(submit("", 1))
        assert await served(raw, welcome) == [""]
        await plain.result()
        await raw.send(GrammarCompiled(welcome.epoch, 12345))  # no query has this number
        await raw.send(GrammarCompiled(welcome.epoch, question.number))
        assert await served(raw, welcome) == ["grammar"]
        await bound.result()
        for total in (1, 1, 3):
            await raw.send(Heartbeat(welcome.epoch, grammar_waits=total))
        await until(lambda: stack.metric("grammar_waits_total") == 3)
        raw.close()


async def served(raw: RawExecutor, welcome: Welcome) -> list[str]:
    """Answer the next plan with one token for each sequence that joins; returns their grammars."""
    while not isinstance(plan := await raw.receive(), StepPlan):
        pass
    await raw.send(StepResult(welcome.epoch, plan.step, pack_int32s([5] * len(plan.joined))))
    return [new.sampling.grammar for new in plan.joined]


async def test_failures_that_cannot_be_end_the_executor(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path, no_grammars="")
        await stack.ready(1)
        asked = await stack.gateway.submit_as(submit("good"))
        while not isinstance(plan := await raw.receive(), StepPlan):
            pass
        failures = (RowFailure(1, "there is no such token"),)
        await raw.send(StepResult(welcome.epoch, plan.step, pack_int32s([5]), failures=failures))
        await stack.ready(0)
        assert stack.dropped("impossible") == 1
        await stack.gateway.abort(asked)
        raw.close()
