"""Structured output through real processes, requested with OpenAI's SDK: answers, also while executors die."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from pagewise_shared.model_files import resolve_model

from benchmarks.chaos.workload import client_of
from benchmarks.processes import Cluster, running
from tests.structured import Reference, matches

MODEL = "pagewise-demo"
FEW = ("--num-blocks=96", "--max-num-seqs=16")
COMPACT = {"disable_any_whitespace": True}
STEP = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 40},
        "kind": {"enum": ["class", "function"]},
    },
    "required": ["name", "numbers", "kind"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"json": STEP, **COMPACT},
    {"regex": r"([a-z]{3,8}, ){12,20}end"},
    {"grammar": 'start: "x = " sum\nsum: /[0-9]{1,9}/ (" + " /[0-9]{1,9}/){12,24}'},
    {"choice": ["yes", "no", "perhaps, if there is time"]},
]


class Step(pydantic.BaseModel):
    """A class that the SDK makes a schema of, and the answer again."""

    kind: Literal["class", "function"]
    numbers: list[int] = pydantic.Field(max_length=3)
    done: bool


async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
    """The output of a request, and why it ended."""
    answer = await client.completions.create(
        model=MODEL,
        prompt=f"def method_{number}(self):\n    return {number}\n" * 8,
        max_tokens=140,
        seed=number,
        extra_body={"structured_outputs": ASKED[number % len(ASKED)]},
    )
    return answer.choices[0].text, str(answer.choices[0].finish_reason)


def holds(number: int, text: str, reason: str) -> bool:
    asked = ASKED[number % len(ASKED)]
    if reason == "length":
        return True
    if "json" in asked:
        return matches(asked["json"], text)
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    return text in asked["choice"] if "choice" in asked else re.fullmatch(r"x = \d+( \+ \d+){12,24}", text) is not None


async def round_trip(client: openai.AsyncOpenAI) -> None:
    """The SDK's own way to ask for a schema, whole and as a stream."""
    messages: Any = [{"role": "user", "content": "What is a class?"}]
    fields: Any = {"model": MODEL, "messages": messages, "max_tokens": 250, "seed": 2, "logprobs": True}
    # A small model may write whitespace without end.
    biased = {"logit_bias": {str(token): -100 for token in blanks()}}
    answer = await client.chat.completions.parse(response_format=Step, **fields, **biased)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.parsed is not None
    assert Step.model_validate_json(choice.message.content or "") == choice.message.parsed
    async with client.chat.completions.stream(response_format=Step, **fields, **biased) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == choice.message.parsed
    with pytest.raises(openai.BadRequestError, match="keywords that are not supported: uniqueItems"):
        await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
            },
        )


def blanks() -> list[int]:
    """Tokens that are nothing but whitespace."""
    tokenizer = Reference(resolve_model(MODEL), "start: /.*/", 4096).tokenizer
    return [token for token in range(4, 4096) if not tokenizer.decode_str([token]).strip(" \n\t\r")]


@pytest.mark.timeout(600)
@pytest.mark.chaos
async def test_answers_match_and_stay_the_same_while_executors_die(tmp_path: Path) -> None:
    with running(Cluster(tmp_path / "fleet", executor_options=FEW), 2) as cluster:
        async with client_of(cluster.url) as client:
            await round_trip(client)
            expected = [await ask(client, number) for number in range(12)]
            assert all(holds(number, *found) for number, found in enumerate(expected))
            assert {reason for _, reason in expected} == {"stop", "length"}
            found = [asyncio.create_task(ask(client, number)) for number in range(12)]
            for number, victim in enumerate(list(cluster.executors)):
                await asyncio.wait(found, timeout=0.3)
                victim.signal(signal.SIGKILL)
                victim.wait()
                cluster.start_executor(f"late-{number}")
            assert [await task for task in found] == expected
        assert cluster.metric("grammar_failures_total") == 0
        assert cluster.metric("structured_requests_total", kind="json") == 2 + 2 * 3
