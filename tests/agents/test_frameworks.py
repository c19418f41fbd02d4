"""Agent frameworks, each in an environment of its own, that call tools by way of Pagewise."""

import functools
import json
import os
import subprocess
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environments
from tests.agents.scripted_server import Scripted

# The first test of a framework installs it.
pytestmark = [pytest.mark.agents, pytest.mark.long, pytest.mark.timeout(900)]
CLIENTS = Path(__file__).with_name("clients")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln \\"🙂\\"", "days": 2}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
ONE = f"Weather?\nWrite:\n<think>\nLet me see.\n</think>\n\nI look.\n{CALL}\nThen:\nThe tools say: {{results}}\nEnd."
TWO = (
    f"Weather?\nWrite:\nBoth at once.\n{CALL}\n{CLOCK}\nThen:\n<think>\nAgain.\n</think>\n\n{CLOCK}\nThen:\n"
    "The tools say: {results}\nEnd."
)
WEATHER, TIME = ["get_weather", 'Köln "🙂"', 2], ["get_time"]
SAID = 'The tools say: 20 degrees in Köln "🙂"'
REPORT = {"city": "Köln", "degrees": 17}


@functools.cache
def python(name: str) -> Path | str:
    """The interpreter of an environment, or why there is none."""
    try:
        return environments.python(CLIENTS / f"{name}.txt")
    except (subprocess.CalledProcessError, OSError) as error:
        return f"{name} cannot be installed: {error}"


def run(
    server: Scripted, environment: str, *command: str, message: str = "", folder: Path | None = None, **more: str
) -> str:
    """The output of a program that is run in an environment. ``more``: further variables."""
    interpreter = python(environment)
    if isinstance(interpreter, str):
        pytest.skip(interpreter)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(interpreter), *command],
        input=message,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=variables | server.environment | {"PYTHONIOENCODING": "utf-8"} | more,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answer(server: Scripted, environment: str, script: str, *arguments: str, message: str) -> Any:
    """The JSON that a script in ``clients`` prints, whose requests are turns of one session.

    Each turn finds the one before it in the cache, and advice on the session is followed.
    """
    session = uuid.uuid4().hex
    message = f"{session}: {message}"  # other sessions have blocks of the instructions and tools alone
    output = run(server, environment, str(CLIENTS / script), *arguments, message=message, SESSION=session)
    told = json.loads(output.splitlines()[-1])
    if "cached" in told:
        cached = told.pop("cached")
        assert cached == sorted(set(cached)), "each turn finds more than the one before"
        assert advise(server, "end", session)["outcome"] == "accepted"
        # Blocks with the thoughts of earlier turns, which the next turn leaves out, hold the beginning that they share.
        released = advise(server, "dontneed", session)
        assert released["outcome"] in ("accepted", "clipped"), released
        assert released["tokens"] > 0
        assert advise(server, "dontneed", session)["outcome"] == "refused", "the rest is released already"
    return told


def advise(server: Scripted, advice: str, session: str) -> Any:
    body = json.dumps({"advice": advice, "session_id": session}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/cache/advice", body, headers)) as told:
        return json.load(told)


@pytest.mark.parametrize("way", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(server: Scripted, api: str, way: str) -> None:
    found = answer(server, "openai-agents", "agents_sdk.py", api, way, "text", message=ONE)
    assert found == {"called": [WEATHER], "final": SAID}
    found = answer(server, "openai-agents", "agents_sdk.py", api, way, "text", message=TWO)
    assert sorted(found["called"][:2]) == [TIME, WEATHER]  # they run at the same time
    assert found["called"][2:] == [TIME]
    assert found["final"] == f"{SAID} and noon and noon"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_with_a_type_of_output(server: Scripted, api: str) -> None:
    message = f"Write:\n{CALL}\nThen:\n{json.dumps(REPORT, ensure_ascii=False)}\nEnd."
    found = answer(server, "openai-agents", "agents_sdk.py", api, "whole", "typed", message=message)
    assert found == {"called": [WEATHER], "final": REPORT}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_tools_of_langchain(server: Scripted, api: str) -> None:
    found = answer(server, "langchain", "langchain_tools.py", api, "tools", message=ONE)
    assert (found["called"], found["final"]) == ([WEATHER], SAID)
    assert found["chunks"] > 10
    assert found["tokens"] > 10


@pytest.mark.parametrize(
    ("api", "method"),
    [
        ("chat", "json_schema"),
        ("chat", "function_calling"),
        ("chat", "json_mode"),
        ("responses", "json_schema"),
        ("responses", "function_calling"),
        ("messages", "json_schema"),
        ("messages", "function_calling"),
    ],
)
def test_structured_output_of_langchain(server: Scripted, api: str, method: str) -> None:
    text = json.dumps(REPORT, ensure_ascii=False)
    if method == "function_calling":
        text = f'<tool_call>\n{{"name": "Report", "arguments": {text}}}\n</tool_call>'
    found = answer(server, "langchain", "langchain_tools.py", api, method, message=f"Write:\n{text}\nEnd.")
    assert found == REPORT


@pytest.mark.parametrize("way", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langgraph(server: Scripted, api: str, way: str) -> None:
    found = answer(server, "langchain", "langgraph_agent.py", api, way, message=TWO)
    assert sorted(found["called"][:2]) == [TIME, WEATHER]
    assert (found["called"][2:], found["final"]) == ([TIME], f"{SAID} and noon and noon")


AIDER = (
    "--no-git", "--no-gitignore", "--yes-always", "--no-check-update", "--analytics-disable", "--no-pretty",
    "--no-show-model-warnings", "--no-show-release-notes", "--no-suggest-shell-commands", "--no-detect-urls",
    "--no-auto-lint", "--map-tokens=0", "--no-fancy-input",
)  # fmt: skip


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize("edit_format", ["diff", "whole"])
def test_aider_edits_a_file(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit_format: str, stream: str
) -> None:
    for name, value in {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "hello.py").write_text('print("hello")\nprint("bye")\n')
    edits = {
        "diff": "hello.py\n```python\n<<<<<<< SEARCH\nprint(\"hello\")\n=======\nprint('Grüße 🙂')\n"
        ">>>>>>> REPLACE\n```",
        "whole": "hello.py\n```\nprint('Grüße 🙂')\nprint(\"bye\")\n```",
    }
    message = f"Greet in German.\nWrite:\nI change it.\n\n{edits[edit_format]}\nEnd."
    command = ["-m", "aider", f"--model=openai/{server.model}", f"--edit-format={edit_format}", stream, *AIDER]
    run(server, "aider", *command, f"--message={message}", "hello.py", folder=tmp_path)
    assert (tmp_path / "hello.py").read_text() == "print('Grüße 🙂')\nprint(\"bye\")\n"
