"""LongRoPE through real processes and HTTP: the answers equal transformers' on both sides of the border."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import torch
import transformers

from benchmarks.processes import serving
from tests.structured import build_structured_model

SHORT_LEN = 32
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT_LEN}


async def test_answers_that_cross_the_border_are_those_of_transformers(tmp_path: Path) -> None:
    build_structured_model(tmp_path, family="phi3")
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = ROPE | {"short_factor": [1.1] * 6, "long_factor": [4.0, *[3.0] * 5]}
    config |= {"original_max_position_embeddings": SHORT_LEN, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = [[(7 * index + length) % 90 + 3 for index in range(length)] for length in (12, 31, 32, 33, 50)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    with serving(str(tmp_path), "--num-blocks=100", "--block-size=8", "--no-profile") as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def tokens(prompt: list[int]) -> list[int]:
                answer = await client.completions.create(
                    model=str(tmp_path),
                    prompt=prompt,
                    max_tokens=30,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                return answer.choices[0].model_dump()["token_ids"]  # type: ignore[no-any-return]

            for _ in range(2):  # the second time beside each other, with cached prefixes
                assert await asyncio.gather(*map(tokens, prompts)) == expected
            assert server.metric("num_preemptions_total") == 0
