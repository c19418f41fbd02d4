"""``from pagewise import LLM``: its results equal those over HTTP, and its processes end with it."""

import contextlib
import gc
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pagewise import LLM, LLMError, SamplingParams
from pagewise_shared.errors import ConfigError

from benchmarks.processes import alive
from tests.gguf_models import build_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["def read(", "class Point:\n", "import "]
MESSAGES = [{"role": "user", "content": "Write a function named read_file."}]
SERVICES = 3
"""Beside the process that starts them."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="64MiB", profile=False, override_generation_config={"temperature": 0}) as model:
        yield model


def post(llm: LLM, path: str, **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    answer = httpx.post(llm.url + path, json=fields, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_outputs_are_those_of_http_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = post(llm, "/v1/completions", prompt=prompt, temperature=0, max_tokens=12, return_token_ids=True)
        choice = answer["choices"][0]
        (one,) = output.outputs
        assert (output.prompt, output.prompt_token_ids) == (prompt, choice["prompt_token_ids"])
        assert (one.text, one.token_ids, one.finish_reason) == (choice["text"], choice["token_ids"], "length")
        assert (one.logprobs, one.cumulative_logprob, output.finished) == (None, None, True)


def test_defaults_are_for_prompts_without_parameters(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
    greedy, drawn = llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, SamplingParams(seed=1, max_tokens=12))
    assert [one.outputs[0].token_ids[:12] for one in llm.generate(PROMPTS)] == [
        one.outputs[0].token_ids for one in greedy
    ]
    assert [one.outputs for one in drawn] != [one.outputs for one in greedy]


def test_a_chat_is_that_of_http(llm: LLM) -> None:
    (output,) = llm.chat(MESSAGES, GREEDY)
    answer = post(llm, "/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=12, return_token_ids=True)
    assert output.outputs[0].text == answer["choices"][0]["message"]["content"]
    assert output.prompt_token_ids == answer["prompt_token_ids"]
    assert output.prompt is not None
    assert output.prompt.startswith("<|user|>")
    assert len(llm.chat([MESSAGES, MESSAGES], GREEDY)) == 2


def test_prompts_may_be_tokens_and_have_parameters_of_their_own(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], GREEDY)[0]
    tokens = text.prompt_token_ids
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3), SamplingParams(n=2, max_tokens=2, seed=1)]
    same, short, several = llm.generate([tokens, {"prompt_token_ids": tokens}, {"prompt": PROMPTS[0]}], params)
    assert same.outputs[0].token_ids == text.outputs[0].token_ids
    assert (same.prompt, several.prompt) == (None, PROMPTS[0])
    assert short.outputs[0].token_ids == text.outputs[0].token_ids[:3]
    assert [one.index for one in several.outputs] == [0, 1]
    assert len(llm.generate(tokens, GREEDY)) == 1, "token ids by themselves are one prompt"


def test_cached_tokens_are_counted(llm: LLM) -> None:
    prompt = {"prompt": "x = 1\n" * 40, "cache_salt": "of this test"}
    assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens > 0 for _ in range(2)] == [False, True]


def test_logprobs_are_by_token_with_ranks(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    (one,) = output.outputs
    assert one.logprobs is not None
    for token, found in zip(one.token_ids, one.logprobs, strict=True):
        assert [entry.rank for entry in found.values()] == [1, 2, 3]
        assert next(iter(found)) == token
    assert (
        "".join(found[token].decoded_token for token, found in zip(one.token_ids, one.logprobs, strict=True))
        == one.text
    )
    total = sum(found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True))
    assert one.cumulative_logprob == pytest.approx(total)
    unlikely = SamplingParams(max_tokens=1, logprobs=1, allowed_token_ids=[one.token_ids[0] + 1])
    assert llm.generate(PROMPTS[0], unlikely)[0].outputs[0].logprobs is not None


def test_requests_that_are_refused_say_which_and_why(llm: LLM) -> None:
    with pytest.raises(LLMError, match=r"prompt 1: temperature: .*>= 0") as caught:
        llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(temperature=-1)])
    assert caught.value.status == 400
    with pytest.raises(ValueError, match="sampling_params has 1 values for 2 prompts"):
        llm.generate(PROMPTS[:2], [GREEDY])
    with pytest.raises(ValueError, match=r"a prompt has 'multi_modal_data'.*text"):
        llm.generate({"prompt": "x", "multi_modal_data": {}})
    with pytest.raises(ValueError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=1)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


async def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


def test_nobody_without_the_key_uses_it(llm: LLM) -> None:
    assert httpx.post(f"{llm.url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 401


def test_more_prompts_than_may_wait_all_run() -> None:
    with LLM(simulate=True, max_waiting=8, max_num_seqs=4) as llm:
        outputs = llm.generate([[token] for token in range(3, 203)], SamplingParams(max_tokens=2, n=2))
        assert [output.prompt_token_ids for output in outputs] == [[token] for token in range(3, 203)]
        with pytest.raises(LLMError, match="n=9: at most max_waiting=8"):
            llm.generate("x", SamplingParams(max_tokens=2, n=9))
    with pytest.raises(LLMError, match="closed"):
        llm.generate("x")
    llm.close()


def test_its_own_thread_may_collect_it() -> None:
    llm = LLM(simulate=True)
    server, loop = llm._server, llm._client._loop
    llm.itself = llm  # type: ignore[attr-defined] # a cycle: the garbage collector ends it, on whichever thread it runs
    del llm
    loop.call_soon_threadsafe(gc.collect)
    until = time.monotonic() + 120
    while server.exit_code is None and time.monotonic() < until:
        time.sleep(0.05)
    assert server.exit_code == 0


def test_options_that_there_are_not_are_named() -> None:
    with pytest.raises(TypeError, match="no option 'kv_memroy': did you mean kv_memory"):
        LLM(kv_memroy="1GiB")
    with pytest.raises(TypeError, match="takes no port"):
        LLM(port=8000)
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        LLM(max_num_seqs=0)


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(LLMError, match=r"(?s)could not be started.*no/such/model"):
        LLM("./no/such/model")


def run(code: str, **options: Any) -> "subprocess.Popen[str]":
    script = f"import os, sys, time\nfrom pagewise import LLM, SamplingParams\nllm = LLM(simulate=True)\n{code}"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **options)


def descendants(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    found = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(found) == 1 + SERVICES
    return found


def assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "they have outlived whoever has started them"
        time.sleep(0.05)


def test_its_processes_end_when_it_is_killed() -> None:
    with run("print('ready', flush=True)\ntime.sleep(100)") as process:
        pids = descendants(process)
        process.send_signal(signal.SIGKILL)
        assert_ended(pids)


def test_its_processes_end_with_a_script_that_fails_or_forks() -> None:
    code = """
if (child := os.fork()) == 0:
    sys.exit()  # runs the handlers of an exit
os.waitpid(child, 0)
assert llm.generate('x'), 'the fork has not ended the services'
print('ready', flush=True)
sys.stdin.readline()
raise RuntimeError('of the script')
"""
    with run(code, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pids = descendants(process)
        _, errors = process.communicate("go\n", timeout=60)
    assert process.returncode == 1
    assert errors.rstrip().endswith("RuntimeError: of the script"), "and nothing is said after it"
    assert not any(map(alive, pids)), "it waits for them"


def test_a_terminal_sees_a_progress_bar_and_a_pipe_does_not() -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    with run("llm.generate(['x'] * 5)", stderr=end) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # a terminal's error when no process writes any more
            while piece := os.read(terminal, 100_000):
                shown += piece
    assert b"5/5" in shown
    os.close(terminal)
    with run("llm.generate(['x'] * 5)", stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=60)
    assert errors == ""


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "python" / "batch.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    # Beside other work, an executor warns that it could not measure the costs of steps.
    errors = [line for line in done.stderr.splitlines() if "costs of steps are not to be trusted" not in line]
    assert (done.returncode, errors) == (0, [])
    assert "'def read(self' -> " in done.stdout


def test_importing_the_package_imports_nothing_more() -> None:
    code = "import sys, pagewise; assert not {'aiohttp', 'msgspec', 'zmq'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.long
def test_a_gguf_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    build_gguf(tmp_path / "m.gguf", "llama", "Q4_K", num_hidden_layers=1)
    params = SamplingParams(max_tokens=3, temperature=0, min_tokens=3)
    with LLM(str(tmp_path / "m.gguf"), kv_memory="16MiB", profile=False) as model:
        [answer] = model.chat([{"role": "user", "content": "the"}], params)
    assert answer.prompt == "the<end>"
    assert len(answer.outputs[0].token_ids) == 3
