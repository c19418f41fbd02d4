"""A run of OpenAI's Agents SDK: ``chat`` or ``responses``, ``whole`` or ``streamed``, ``text`` or ``typed``."""

import asyncio
import json
import os
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

api, way, kind = sys.argv[1:]
called: list[object] = []


@function_tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    called.append(["get_weather", city, days])
    return f"{10 * days} degrees in {city}"


@function_tool
def get_time() -> str:
    """The time."""
    called.append(["get_time"])
    return "noon"


class Report(BaseModel):
    city: str
    degrees: int


async def main() -> None:
    set_tracing_disabled(True)
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
    agent = Agent(
        name="weather",
        instructions="You tell the weather.",
        model=model(os.environ["MODEL"], AsyncOpenAI(max_retries=0)),
        model_settings=ModelSettings(
            parallel_tool_calls=True,
            include_usage=True,
            reasoning=Reasoning(effort="low", summary="auto"),
            extra_args={"prompt_cache_key": os.environ["SESSION"]},
        ),
        tools=[get_weather, get_time],
        output_type=Report if kind == "typed" else None,
    )
    if way == "streamed":
        result = Runner.run_streamed(agent, sys.stdin.read())
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, sys.stdin.read())
    final = result.final_output
    cached = [one.usage.input_tokens_details.cached_tokens for one in result.raw_responses]
    print(json.dumps({"called": called, "final": final.model_dump() if kind == "typed" else final, "cached": cached}))


asyncio.run(main())
