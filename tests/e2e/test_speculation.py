"""Speculation in real processes: the demo model's answers are the same with drafts and without."""

import asyncio
from typing import Any

import openai

from benchmarks.processes import serving

CODE = """def first(values):
    total = 0
    for value in values:
        total += value
    return total


def second(values):
    total = 0
    for value in"""


async def test_answers_are_those_without_drafts() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.4, "seed": 3},
        {"temperature": 0.7, "seed": 4, "n": 2},
        {"temperature": 0, "stop": ["return"]},
    ]
    with serving("--speculative", "ngram:4", "--num-blocks", "100", "--no-profile") as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def texts(**more: Any) -> list[list[str]]:
                asked = {"model": "pagewise-demo", "prompt": CODE, "max_tokens": 80}
                answers = await asyncio.gather(*(client.completions.create(**asked, **kind, **more) for kind in kinds))
                return [[choice.text for choice in answer.choices] for answer in answers]

            expected = await texts(logprobs=0)  # for which nothing is drafted
            assert server.metric("spec_decode_num_drafts_total") == 0
            assert await texts() == expected
            alone = await client.completions.create(model="pagewise-demo", prompt=CODE, max_tokens=80, temperature=0)
            assert [alone.choices[0].text] == expected[0]
            assert server.metric("spec_decode_num_accepted_tokens_total") > 10
