"""``pagewise segments``: its counts, the texts it names, and its refusals; twice as a process."""

import contextlib
import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pagewise_gateway.segment_report import main

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
EDGE = 15
"""Tokens that are not counted at either end of a repeated text, at most."""


def run_process(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagewise.main", "segments", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """The same, without the seconds that a process takes for its imports."""
    words, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def report(*arguments: object) -> dict[str, Any]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def refusal(*arguments: object) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


def test_token_ids_need_no_model(tmp_path: Path) -> None:
    """A prefix of 64 tokens, and two documents in either order, with words of their own around them."""
    one, two, prefix = ids(1, 300), ids(2, 200), ids(3, 64)
    trace = written(
        tmp_path / "trace.jsonl",
        prefix + one + ids(4, 20) + two,
        {"prompt": [*prefix, *two, *ids(5, 30), *one], "max_tokens": 3},
        {"prompt": [prefix + two + ids(6, 10) + one, one], "model": "any"},
    )
    done = run_process(trace)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["trace"], told["requests"], told["prompts"]) == ("trace.jsonl", 3, 4)
    tokens = told["tokens"]
    assert tokens["all"] == 584 + 594 + 574 + 300
    # The third prompt begins as the second one does, up to the end of a block of 16 tokens.
    assert tokens["reached_by_prefixes"] == 64 + (64 + 200) // 16 * 16
    repeated = 300 + 200 + 300 + 300
    assert repeated - 4 * 2 * EDGE <= tokens["repeated_beyond_prefixes"] <= repeated
    assert tokens["new"] == tokens["all"] - tokens["reached_by_prefixes"] - tokens["repeated_beyond_prefixes"]
    assert told["shares"]["new"] == pytest.approx(tokens["new"] / tokens["all"], abs=1e-4)
    first, second = told["segments"]
    assert (first["repeated"], second["repeated"]) == (3, 1)
    assert 300 - 2 * EDGE <= first["tokens"] <= 300
    assert 200 - 2 * EDGE <= second["tokens"] <= 200
    place = first["first"]
    assert (place["line"], place["prompt"]) == (1, 0)
    assert 64 <= place["token"] <= 64 + EDGE
    assert first["begins"] == (prefix + one)[place["token"] : place["token"] + 24]
    assert told["forgotten"] == 0


def test_texts_and_conversations_are_what_the_model_makes_of_them(tmp_path: Path) -> None:
    """Also as lines of a batch, and gzipped."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(300)]
    document = " ".join(words)  # a document that repeats its own sentences would be listed in parts
    trace = tmp_path / "trace.jsonl.gz"
    rows: list[object] = [
        {"prompt": f"Read this. {document} What is said of the seventh?"},
        {"method": "POST", "body": {"messages": [{"role": "user", "content": f"Rivers! {document} Now sum up."}]}},
        {"messages": [{"role": "system", "content": "You know geography."}, {"role": "user", "content": document}]},
    ]
    with gzip.open(trace, "wt") as file:
        file.write("".join(json.dumps(row) + "\n\n" for row in rows))
    told = report(trace, "--model", "pagewise-demo")
    assert told["requests"] == 3
    (segment,) = told["segments"]
    assert segment["repeated"] == 2
    assert segment["tokens"] * 2 <= told["tokens"]["repeated_beyond_prefixes"] + 2 * EDGE
    assert told["shares"]["repeated_beyond_prefixes"] > 0.5
    assert segment["begins"].strip()
    assert segment["begins"] in f"Read this. {document}"
    assert "line 1 holds text: name the model" in refusal(trace)
    assert report(trace, "--model", "pagewise-demo", "--limit", 1)["segments"] == []


def test_a_prompt_that_contains_a_text_twice_repeats_it_once(tmp_path: Path) -> None:
    text = ids(1, 300)
    told = report(written(tmp_path / "trace.jsonl", text, ids(2, 20) + text + ids(3, 20) + text))
    (segment,) = told["segments"]
    assert segment["repeated"] == 1
    assert told["tokens"]["repeated_beyond_prefixes"] >= 2 * (300 - 2 * EDGE)


def test_salts_are_apart(tmp_path: Path) -> None:
    text = ids(1, 300)
    bodies = [{"prompt": ids(n, 20) + text, "cache_salt": salt} for n, salt in ((2, "a"), (3, "b"))]
    told = report(written(tmp_path / "apart.jsonl", *bodies, {"prompt": text}))
    assert told["tokens"]["new"] == told["tokens"]["all"]
    bodies[1]["cache_salt"] = "a"
    assert report(written(tmp_path / "same.jsonl", *bodies))["tokens"]["repeated_beyond_prefixes"] >= 300 - 2 * EDGE


def test_little_memory_forgets_and_says_so(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.jsonl", *(ids(n, 3000) for n in range(6)), ids(0, 3000))
    told = report(trace, "--remember", 500)
    assert told["settings"]["remember"] == 512
    assert told["forgotten"] > 1000
    assert report(trace)["tokens"]["reached_by_prefixes"] == 2992


def test_requests_that_a_gateway_would_refuse_are_left_out_and_told(tmp_path: Path) -> None:
    bad: list[object] = [
        {"prompt": ids(1, 100), "suffix": "end"},
        {"messages": [{"role": "tool", "content": "7"}]},
        {"prompt": ids(1, 100), "truncate_prompt_tokens": -1},
    ]
    told = report(written(tmp_path / "some.jsonl", ids(1, 100), *bad), "--model", "pagewise-demo")
    assert (told["requests"], told["tokens"]["all"]) == (1, 100)
    assert told["refused"] == {"requests": 3, "first": "line 2: suffix is not supported by Pagewise"}
    assert "would refuse all of them: line 1: suffix" in refusal(written(tmp_path / "all.jsonl", bad[0]))


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        ("mooncake_conversation_trace.jsonl.gz", 'line 1 has neither "prompt" nor "messages"'),
        ("cc_agentic_max64k_min10req.rle.jsonl.gz", 'line 1 has neither "prompt" nor "messages"'),
        ("sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz", "line 1 is not JSON"),
    ],
)
def test_traces_without_texts_are_refused(trace: str, reason: str) -> None:
    assert reason in refusal(TRACES / trace)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it holds no requests"),
        (b"[1, 2, -3]\n", "line 1 is no list of token ids"),
        (b"[1, 2]\n{nonsense\n", "line 2 is not JSON"),
        (b'{"question": 1}\n', 'neither "prompt" nor "messages"'),
        (b'"text"\n', "line 1 is no request"),
        (b"\xff\xfe\x00", "line 1 is not JSON"),
    ],
)
def test_other_files_get_an_error_that_says_what_is_wrong(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "trace").write_bytes(content)
    assert reason in refusal(tmp_path / "trace")


def test_files_and_models_that_are_not_there(tmp_path: Path) -> None:
    done = run_process(tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such file" in done.stderr
    assert "Traceback" not in done.stderr
    trace = written(tmp_path / "trace.jsonl", [1, 2])
    assert "no such model" in refusal(trace, "--model", "/nowhere/model")
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"[1, 2]\n" * 1000)[:-9])
    assert "EOFError" in refusal(tmp_path / "broken.gz")
