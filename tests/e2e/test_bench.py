"""``pagewise bench`` as its users run it, against Pagewise through its processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--simulate", "--simulate-step=0.005") as running:
        yield running


def measured(folder: Path, *arguments: object) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    command = [
        sys.executable,
        "-m",
        "pagewise.main",
        "bench",
        "--result-filename=result.json",
        f"--result-dir={folder}",
    ]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), done


def test_what_it_counts_is_what_the_server_counts(server: Served, tmp_path: Path) -> None:
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generation_tokens_total")}
    options = "--num-prompts 12 --random-input-len 150 --random-output-len 20 --request-rate 40 --num-warmups 0"
    result, done = measured(tmp_path, f"--base-url={server.url}/v1", *options.split())
    (served,) = result["servers"]
    (got,) = served["rounds"]
    assert (got["completed"], got["failed"], got["output_tokens"]) == (12, 0, 240)
    assert got["input_tokens"] == pytest.approx(12 * 150, rel=0.05), "the words were calibrated"
    # Besides: the first look of 8 tokens, and twice 1 to calibrate.
    assert server.metric("generation_tokens_total") - before["generation_tokens_total"] == 240 + 10
    assert server.metric("prompt_tokens_total") - before["prompt_tokens_total"] > got["input_tokens"]
    assert served["model"] == "pagewise-demo"
    assert served["version"]
    assert "12 of 12 requests" in done.stderr
    assert "\r" not in done.stderr


def test_shared_prefixes_and_sessions_are_found_in_the_cache_and_random_prompts_are_not(
    server: Served, tmp_path: Path
) -> None:
    common = (f"--base-url={server.url}", "--num-prompts=12", "--max-concurrency=2", "--num-warmups=0")
    shares = {}
    for name, options in {
        "random": "--random-input-len 150 --random-output-len 4",
        "prefix_repetition": "--prefix-repetition-num-prefixes 2 --prefix-repetition-output-len 4",
        "multi-turn": "--backend openai-chat --multi-turn-num-turns 4 --multi-turn-output-len 8",
    }.items():
        result, _ = measured(tmp_path, *common, f"--dataset-name={name}", *options.split())
        shares[name] = result["servers"][0]["rounds"][0]["cached_share"]
    assert shares["random"] < 0.05
    assert shares["prefix_repetition"] > 0.3
    assert shares["multi-turn"] > 0.4


def test_one_server_under_two_names_is_no_faster_than_itself(server: Served, tmp_path: Path) -> None:
    options = "--num-prompts 4 --random-input-len 60 --random-output-len 8 --rounds 2"
    plot = tmp_path / "plot.svg"
    result, done = measured(
        tmp_path, f"--base-url=a={server.url}", f"--base-url=b={server.url}", f"--plot={plot}", *options.split()
    )
    assert "a over that server" in done.stdout
    ratios = result["servers"][1]["first_over_this"]
    assert ratios["output_throughput"]["differs"] is False
    assert any("fewer than 6 rounds" in caveat for caveat in result["caveats"])
    assert max(round_["cached_share"] for one in result["servers"] for round_ in one["rounds"]) < 0.1
    assert plot.read_text().startswith("<?xml")
