"""LangGraph's prebuilt agent, with a model that speaks ``chat``, ``responses`` or ``messages``."""

import json
import os
import sys
import warnings

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

warnings.simplefilter("ignore")  # it has another name now, in LangChain
api, way = sys.argv[1:]
called: list[object] = []


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    called.append(["get_weather", city, days])
    return f"{10 * days} degrees in {city}"


@tool
def get_time() -> str:
    """The time."""
    called.append(["get_time"])
    return "noon"


usual = {"model": os.environ["MODEL"], "stream_usage": True, "max_retries": 0}
if api == "messages":
    model = ChatAnthropic(max_tokens=1000, default_headers={"X-Session-Id": os.environ["SESSION"]}, **usual)
else:
    named = {"prompt_cache_key": os.environ["SESSION"]}
    model = ChatOpenAI(use_responses_api=api == "responses", model_kwargs=named, **usual)
agent = create_react_agent(model, [get_weather, get_time], prompt="You tell the weather.")
asked = {"messages": [HumanMessage(sys.stdin.read())]}
if way == "streamed":
    for mode, state in agent.stream(asked, stream_mode=["messages", "values"]):
        if mode == "values":
            result = state
else:
    result = agent.invoke(asked)
usages = [one.usage_metadata for one in result["messages"] if one.type == "ai"]
cached = [usage["input_token_details"].get("cache_read", 0) for usage in usages]
print(json.dumps({"called": called, "final": result["messages"][-1].text, "cached": cached}))
