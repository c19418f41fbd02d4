"""LangChain's models: ``chat``, ``responses`` or ``messages``; a method of ``with_structured_output``, or ``tools``."""

import json
import os
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

api, method = sys.argv[1:]
called: list[object] = []


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    called.append(["get_weather", city, days])
    return f"{10 * days} degrees in {city}"


class Report(BaseModel):
    """A report on the weather."""

    city: str
    degrees: int


usual = {"model": os.environ["MODEL"], "stream_usage": True, "max_retries": 0}
if api == "messages":
    model = ChatAnthropic(max_tokens=1000, default_headers={"X-Session-Id": os.environ["SESSION"]}, **usual)
else:
    named = {"prompt_cache_key": os.environ["SESSION"]}
    model = ChatOpenAI(use_responses_api=api == "responses", model_kwargs=named, **usual)
messages = [HumanMessage(sys.stdin.read())]
if method != "tools":
    report = model.with_structured_output(Report, method=method).invoke(messages)
    print(json.dumps(report.model_dump()))
    sys.exit()
bound = model.bind_tools([get_weather])
answer = bound.invoke(messages)
answers = [answer]
while answer.tool_calls:
    messages.append(answer)
    messages += [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    chunks = list(bound.stream(messages))
    answer = sum(chunks[1:], start=chunks[0])
    answers.append(answer)
usages = [one.usage_metadata for one in answers]
cached = [usage["input_token_details"].get("cache_read", 0) for usage in usages]
told = {"called": called, "final": answer.text, "chunks": len(chunks), "tokens": usages[-1]["output_tokens"]}
print(json.dumps(told | {"cached": cached}))
