"""``pagewise replay``: its input, its counts, and that it replays the real scheduler."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.main import main
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceError, TraceRequest, read_trace
from pagewise_shared.protocol import HOST

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"


def mooncake(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([str(argument) for argument in arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_mooncake_ids_are_shared_prefixes_and_nothing_else_is(tmp_path: Path) -> None:
    rows = [(0, 1100, 5, [1, 2, 3]), (0, 1300, 5, [1, 2, 4]), (3000, 600, 5, [1, 9])]
    first, second, third = read_trace(mooncake(tmp_path / "t.jsonl", rows))
    assert [first.arrival, second.arrival, third.arrival] == [0.0, 1.5, 3.0], "a bin is spread up to the next"
    assert [len(request.prompt()) for request in (first, second, third)] == [1100, 1300, 600]
    assert first.prompt()[:1024] == second.prompt()[:1024]
    assert first.prompt()[1024:] != second.prompt()[1024:1100]
    assert first.prompt()[:512] == third.prompt()[:512]
    assert third.prompt()[512] != first.prompt()[512]


def test_the_other_formats(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.68059,374,44",
        "2023-11-16 18:15:50.18059,30,0",
    )
    azure.write_text("\n".join(rows) + "\n")
    first, second = read_trace(azure)
    assert (first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert (second.arrival, second.num_output_tokens) == (pytest.approx(3.5), 1)
    assert first.prompt()[0] != second.prompt()[0]
    sharegpt = tmp_path / "s.csv.gz"
    with gzip.open(sharegpt, "wt") as file:
        file.write("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n10,3,13,3.0\n")
    first, second = read_trace(sharegpt, rate=2.0)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (74, 918)
    assert 0 < first.arrival < second.arrival
    agentic = tmp_path / "g.jsonl"
    turn = {"in": 200, "out": 10, "think_time": 2.5, "hash_runs": [[1, 3]], "type": "n", "t": 7.0, "api_time": 1.0}
    nested = {"type": "subagent", "requests": [turn | {"hash_runs": [[9, 1]]}]}
    session = {"block_size": 64, "requests": [turn, turn | {"hash_runs": [[1, 2], [5, 1]]}, nested]}
    agentic.write_text(json.dumps(session) + "\n" + json.dumps(session) + "\n")
    requests = read_trace(agentic)
    assert [request.after for request in requests] == [-1, 0, 1, -1, 3, 4]
    assert [request.arrival for request in requests[:3]] == [7.0, 2.5, 2.5]
    assert requests[0].blocks[:2] == requests[1].blocks[:2]
    assert not set(requests[0].blocks) & set(requests[3].blocks), "ids are a session's own"


def test_streamed_answers_of_unknown_ends_call_tools_within_the_time_between_the_requests(tmp_path: Path) -> None:
    turn = {"in": 200, "out": 10, "hash_runs": [[1, 3]], "type": "s", "stop": None}
    times = [turn | {"t": 0.0}, turn | {"t": 7.0, "think_time": 5.0}, turn | {"t": 15.0, "think_time": 13.0}]
    known = turn | {"t": 90.0, "think_time": 60.0, "stop": "end_turn", "api_time": 2.0}
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps({"block_size": 64, "requests": [*times, known]}))
    requests = read_trace(path)
    assert [request.arrival for request in requests] == [0.0, 5.0, 8.0, 60.0]
    assert [request.tool_call for request in requests] == [True, True, True, False]


def test_beladys_rule_keeps_what_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if block 0, whose tokens might equal outputs, begins every prompt: as in Mooncake's conversations."""
    rows = [(n, 2100, 600, [0, *range(10 * (n % 6) + 1, 10 * (n % 6) + 4)]) for n in range(60)]
    path = mooncake(tmp_path / "t.jsonl", rows)
    found = {
        eviction: replayed(capsys, path, "--kv-tokens", 7000, "--cache-only", "--eviction", eviction)["hit_rate"]
        for eviction in ("lru", "cost", "belady")
    }
    rates = {eviction: rate["of_trace_blocks"] for eviction, rate in found.items()}
    assert rates["belady"] > 0.5 > rates["lru"]
    assert rates["belady"] >= rates["cost"]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"x": 1}\n', '{"timestamp": 1, "input_length": 2}\n', "{not json\n"]
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    if text:
        with pytest.raises(TraceError, match=r"x\.jsonl"):
            read_trace(path)
    assert main([str(path)]) == 2
    assert "x.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--kv-tokens=many", "--kv-tokens=3", "--host-tokens=-1"])
def test_bad_sizes_are_refused(tmp_path: Path, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", [(0, 600, 5, [1, 2])])
    assert main([str(path), argument]) == 2
    assert "pagewise replay: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--eviction", "belady"], "--cache-only"),
        (["--json", "/nowhere/at/all.json"], "there is no directory"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_replay(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n')
    assert main([str(path), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--block-size", "--speed", "--link", "--rate", "--max-num-seqs", "--limit"])
def test_options_of_nothing_are_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        main(["t.jsonl", option, "0"])


def test_the_cache_alone_hits_what_the_trace_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(i, 1024 + 100 * (i % 2), 4, [1, 2, 3] if i % 2 else [1, 2]) for i in range(6)]
    path = mooncake(tmp_path / "t.jsonl", rows)
    result = replayed(capsys, path, "--cache-only", "--kv-tokens", "all")
    assert result["requests"] == {"finished": 6, "never_fit": 0}
    total = sum(len(row[3]) for row in rows)
    assert result["hit_rate"]["of_trace_blocks"] == round((total - 3) / total, 4)


def test_a_day_goes_by_in_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(i * 3_600_000, 600, 50, [i, i + 1000]) for i in range(24)]
    result = replayed(capsys, mooncake(tmp_path / "t.jsonl", rows), "--json", tmp_path / "out.json")
    assert 82_800 < result["virtual_seconds"] < 82_900
    assert result["requests"]["finished"] == 24
    assert result["good_requests"] == 1.0
    assert 0 < result["seconds"]["first_token"]["p50"] < 1
    assert json.loads((tmp_path / "out.json").read_text()) == result


def test_host_memory_turns_misses_into_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(i * 2000, 2048, 8, [10 * (i % 4) + j for j in range(4)]) for i in range(16)]
    path = mooncake(tmp_path / "t.jsonl", rows)
    without = replayed(capsys, path, "--kv-tokens", "4500", "--eviction", "lru")
    with_host = replayed(capsys, path, "--kv-tokens", "4500", "--host-tokens", "20K", "--eviction", "lru")
    assert without["hit_rate"]["all"] == 0.0
    assert with_host["hit_rate"]["host"] == pytest.approx(0.75, abs=0.01)
    assert with_host["recoveries"]["by_method"]["load"] == 12
    assert with_host["blocks"]["loaded"] > 0
    assert with_host["seconds"]["first_token"]["p50"] < without["seconds"]["first_token"]["p50"]


def test_a_replay_is_reproducible() -> None:
    def run() -> list[float]:
        trace = [TraceRequest(i * 0.05, 300 + 40 * (i % 7), 20, [i % 5], 256, i) for i in range(60)]
        scheduler = Scheduler(
            num_blocks=120,
            block_size=16,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            tiers={HOST: 100},
            eviction="cost",
        )
        outcome = Simulation([scheduler], llama_3_8b(16)).run(trace)
        assert scheduler.kv.num_available == 120
        return [served.finished for served in outcome.served]

    assert run() == run()


def test_the_command(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [(0, 600, 5, [1, 2])])
    command = [sys.executable, "-m", "pagewise.main", "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["requests"]["finished"] == 1
    help_text = subprocess.run([*command[:-1], "--help"], capture_output=True, text=True, check=True).stdout
    assert "--kv-tokens" in help_text


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_mooncake_trace_hits_what_is_known_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    trace = TRACES / "mooncake_synthetic_trace.jsonl.gz"
    rates = {}
    for name, tokens, policy in (("all", "all", "lru"), ("lru", "3M", "lru"), ("cost", "3M", "cost")):
        result = replayed(capsys, trace, "--cache-only", "--kv-tokens", tokens, "--eviction", policy)
        rates[name] = result["hit_rate"]["of_trace_blocks"]
    assert rates["all"] == pytest.approx(0.640, abs=0.001)
    assert rates["lru"] >= 0.309
    assert rates["cost"] > rates["lru"] + 0.02
