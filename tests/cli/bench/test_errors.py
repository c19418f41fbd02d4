"""What people get wrong is answered by a sentence that says what to do."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from pagewise.bench.command import bench
from pagewise.bench.report import command

from tests.cli.bench.stub_server import stub_server


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert bench(["--disable-tqdm", "--num-prompts=1", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pagewise bench: ")
    assert said.err.count("\n") == 1, "one sentence, no traceback"
    return said.err


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEWISE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "--base-url=http://127.0.0.1:1/v1")
    assert "no server answers at http://127.0.0.1:1 (" in said
    assert "pagewise serve" in said


def test_a_model_that_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(models=("this", "that")) as stub:
        assert "no model 'other'. /v1/models lists: this, that" in fails(
            capsys, f"--base-url={stub.url}", "--model=other"
        )
    with stub_server(lists=500) as stub:
        assert "/v1/models answers 500: Internal Server Error. Name a model with --model" in fails(
            capsys, f"--base-url={stub.url}"
        )
        assert "no /v1/completions for 'other': " in fails(capsys, f"--base-url={stub.url}", "--model=other")


def test_options_for_each_server(capsys: pytest.CaptureFixture[str]) -> None:
    urls = ("--base-url=http://a", "--base-url=http://b", "--base-url=http://c")
    assert "--model is given 2 times for 3 servers" in fails(capsys, *urls, "--model=x", "--model=y")
    assert "--api-key-env is given 2 times for 3 servers" in fails(capsys, *urls, "--api-key-env=X", "--api-key-env=Y")


def test_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_server(key="secret") as stub:
        url = f"--base-url={stub.url}"
        assert "wants an API key (401): set PAGEWISE_API_KEY" in fails(capsys, url)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        assert "refuses the key in OPENAI_API_KEY (401)" in fails(capsys, url)
        assert "--api-key-env MINE: this environment variable is not set" in fails(capsys, url, "--api-key-env=MINE")
        monkeypatch.setenv("MINE", "secret")
        assert bench([url, "--api-key-env=MINE", "--num-prompts=1", "--disable-tqdm"]) == 0
        assert "secret" not in capsys.readouterr().out


def test_requests_that_are_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(max_model_len=1000) as stub:
        said = fails(capsys, f"--base-url={stub.url}")
        assert "about 1,152 tokens with its output, and max_model_len of stub is 1,000" in said


def test_a_first_request_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(fails=lambda number: 500) as stub:
        assert "a first request fails: HTTP 500" in fails(capsys, f"--base-url={stub.url}")
        assert "has no /v2/other for 'stub'" in fails(capsys, f"--base-url={stub.url}", "--endpoint=/v2/other")


def test_urls(capsys: pytest.CaptureFixture[str]) -> None:
    assert "begins with http://" in fails(capsys, "--base-url=localhost:8000")
    assert "no credentials in URLs" in fails(capsys, "--base-url=http://me:secret@localhost")
    assert "two servers have one name" in fails(capsys, "--base-url=a=http://x", "--base-url=a=http://y")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--goodput", "tft:5"], "'tft' is none of ttft, tpot, e2el"),
        (["--duration", "5"], "needs --request-rate, --max-concurrency or --num-prompts"),
        (["--dataset-name", "trace"], "--dataset-name trace needs --dataset-path"),
        (["--plot", "x.txt"], "figures are .svg, .png, .pdf"),
        (["--plot", "/no/where/x.svg"], "there is no directory /no/where"),
        (["--request-rate", "0"], "a number above 0"),
        (["--num-prompts", "0"], "at least 1"),
        (["--header", "x"], "write NAME=VALUE"),
    ],
)
def test_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_packages_that_are_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tqdm" else find(name, *rest))
    assert "it needs tqdm: pip install 'pagewise[bench]'" in fails(capsys)


def test_the_options_are_shown_without_the_extra() -> None:
    """--help works where nothing but pagewise is installed."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(('aiohttp', 'tqdm', 'matplotlib', 'uvloop')))"
    code = f"{hidden}; from pagewise.main import main; main(['bench', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-concurrency" in done.stdout


def test_what_headers_hold_is_not_written() -> None:
    shown = command(["--header", "Authorization=Bearer x", "--header=X-Key=y", "--num-prompts", "3"])
    assert shown == "pagewise bench --header Authorization=... --header=X-Key=... --num-prompts 3"


def test_the_command_is_one_of_pagewise_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagewise.main", "bench", "--base-url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
