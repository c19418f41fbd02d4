"""The helpers of OpenAI's and Anthropic's SDKs that run tools and parse answers, against real processes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_async_tool
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.agents.scripted_server import Scripted

pytestmark = pytest.mark.timeout(300)  # the first test starts the server


class GetWeather(BaseModel):
    city: str
    days: int


class Report(BaseModel):
    city: str
    degrees: int


CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Köln \\"🙂\\"", "days": 2}}\n</tool_call>'
WEATHER = GetWeather(city='Köln "🙂"', days=2)
SCRIPT = f"Weather?\nWrite:\n<think>\nLet me see.\n</think>\n\nI look.\n{CALL}\nThen:\nThe tools say: {{results}}\nEnd."
ASKED: Any = {"role": "user", "content": SCRIPT}
REPORT = Report(city="Köln", degrees=17)
REPORTED = f"Write:\n{REPORT.model_dump_json()}\nEnd."


@pytest.fixture(autouse=True)
def _variables(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(max_retries=0) as client:
        yield client


@pytest.fixture
async def claude() -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(max_retries=0) as client:
        yield client


@pytest.mark.parametrize("way", ["parse", "stream"])
async def test_chat_completions(server: Scripted, client: AsyncOpenAI, way: str) -> None:
    tools = [pydantic_function_tool(GetWeather)]
    messages: list[Any] = [ASKED]

    async def answer() -> Any:
        if way == "parse":
            return await client.chat.completions.parse(model=server.model, messages=messages, tools=tools)
        async with client.chat.completions.stream(model=server.model, messages=messages, tools=tools) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        arguments = "".join(e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta")
        assert arguments == "".join(call.function.arguments for call in final.choices[0].message.tool_calls or ())
        return final

    first = (await answer()).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I look.")
    (call,) = first.message.tool_calls
    assert call.function.parsed_arguments == WEATHER
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "17 Grad"}]
    last = (await answer()).choices[0]
    assert (last.finish_reason, last.message.content) == ("stop", "The tools say: 17 Grad")
    assert not last.message.tool_calls


async def test_a_chat_completion_of_a_type(server: Scripted, client: AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": REPORTED}]
    answer = await client.chat.completions.parse(model=server.model, messages=asked, response_format=Report)
    assert answer.choices[0].message.parsed == REPORT
    asked += [answer.choices[0].message.model_dump(warnings=False), {"role": "user", "content": "Write:\nI did.\nEnd."}]
    answer = await client.chat.completions.parse(model=server.model, messages=asked)
    assert answer.choices[0].message.content == "I did."


@pytest.mark.parametrize("way", ["parse", "stream"])
async def test_responses(server: Scripted, client: AsyncOpenAI, way: str) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}]
    items: list[Any] = [ASKED]
    options: Any = {"model": server.model, "input": items, "tools": tools, "include": ["reasoning.encrypted_content"]}

    async def answer() -> Any:
        if way == "parse":
            return await client.responses.parse(**options)
        async with client.responses.stream(**options) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    first = await answer()
    thought, said, call = first.output
    assert (thought.content[0].text, said.content[0].text) == ("Let me see.", "I look.")
    assert GetWeather.model_validate_json(call.arguments) == WEATHER
    items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "17 Grad"})
    assert (await answer()).output_text == "The tools say: 17 Grad"


async def test_a_response_of_a_type(server: Scripted, client: AsyncOpenAI) -> None:
    answer = await client.responses.parse(model=server.model, input=REPORTED, text_format=Report)
    assert answer.output_parsed == REPORT
    async with client.responses.stream(model=server.model, input=REPORTED, text_format=Report) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == REPORT


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner(server: Scripted, claude: anthropic.AsyncAnthropic, stream: bool) -> None:
    called: list[GetWeather] = []

    @beta_async_tool(name="GetWeather")
    async def get_weather(city: str, days: int) -> str:
        """The weather in a city."""
        called.append(GetWeather(city=city, days=days))
        return "17 Grad"

    options: Any = {"model": server.model, "max_tokens": 500, "messages": [ASKED], "tools": [get_weather]}
    kinds, last = [], None
    if stream:
        async for turn in claude.beta.messages.tool_runner(**options, stream=True):
            events = [event.type async for event in turn]
            assert (events[0], events[-1]) == ("message_start", "message_stop")
            last = await turn.get_final_message()
            kinds.append([block.type for block in last.content])
    else:
        async for last in claude.beta.messages.tool_runner(**options):
            kinds.append([block.type for block in last.content])
    assert kinds == [["thinking", "text", "tool_use"], ["text"]]
    assert called == [WEATHER]
    assert last is not None
    assert last.stop_reason == "end_turn"
    assert last.content[0].text == "The tools say: 17 Grad"


async def test_a_message_of_a_type(server: Scripted, claude: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"model": server.model, "messages": [{"role": "user", "content": REPORTED}]}
    answer = await claude.messages.parse(**asked, max_tokens=500, output_format=Report)
    assert answer.parsed_output == REPORT
    async with claude.messages.stream(**asked, max_tokens=500, output_format=Report) as stream:
        final = await stream.get_final_message()
    assert final.parsed_output == REPORT
    counted = await claude.messages.count_tokens(**asked)
    usage = final.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_the_grammar_of_a_type_is_followed(server: Scripted, client: AsyncOpenAI) -> None:
    """Otherwise the tests above would show nothing of it."""
    asked: list[Any] = [{"role": "user", "content": f"Write:\n{json.dumps({'city': 1})}\nEnd."}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "Report", "schema": Report.model_json_schema()}}
    answer = await client.chat.completions.create(model=server.model, messages=asked, response_format=form)
    assert answer.choices[0].message.content == 'The grammar forbids the script behind: {"city": '
