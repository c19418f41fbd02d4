"""Prompts of some blocks, and how much of them was cached."""

from typing import Any

import openai


def prompt(number: int) -> str:
    return f"class Account{number}:\n" + f"    def method_{number}(self):\n        return {number}\n" * 12


async def complete(client: openai.AsyncOpenAI, text: str, max_tokens: int = 4, **options: Any) -> tuple[str, int, int]:
    """The output, and how many tokens the prompt has and how many of them were cached."""
    answer = await client.completions.create(
        model="pagewise-demo", prompt=text, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    usage: Any = answer.usage
    return answer.choices[0].text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
