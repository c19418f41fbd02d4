"""The load generator against a server whose delays are scripted, on real sockets."""

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagewise.bench.command import bench

from tests.cli.bench.stub_server import Stub, stub_server, words

LATE = 0.08
"""Seconds by which a busy machine may delay an event."""


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEWISE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def measured(tmp_path: Path, *arguments: object, urls: tuple[str, ...] = ()) -> dict[str, Any]:
    """The result of a run, read from its file. One word is one token for the stub."""
    given = [f"--base-url={url}" for url in urls]
    common = ["--num-warmups=0", "--random-input-len=20", "--result-filename=result.json", f"--result-dir={tmp_path}"]
    assert bench([*given, *common, *map(str, arguments)]) in (0, 1)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return result


def one_round(result: dict[str, Any]) -> dict[str, Any]:
    (server,) = result["servers"]
    (metrics,) = server["rounds"]
    return dict(metrics)


def undisturbed(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a run in which the load generator was not kept waiting by other work of this machine."""
    for _ in range(8):
        result = measure()
        client = one_round(result)["client"]
        if client["loop_lag_max_ms"] < 1e3 * LATE / 4 and client["sent_late_p99_ms"] < 1e3 * LATE / 4:
            return result
    pytest.skip("other work keeps this machine too busy to measure milliseconds")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_latencies_are_those_of_the_server(tmp_path: Path, backend: str) -> None:
    with stub_server(first=0.3, gap=0.05, cached=5) as stub:
        arguments = ("--backend", backend, "--num-prompts", 4, "--random-output-len", 9)
        result = undisturbed(lambda: measured(tmp_path, *arguments, urls=(stub.url,)))
    got = one_round(result)
    assert (got["completed"], got["output_tokens"], got["cached_tokens"]) == (4, 36, 20)
    assert 300 <= got["ttft_ms"]["median"] < 300 + 1e3 * LATE
    assert got["tpot_ms"]["median"] == pytest.approx(50, abs=1e3 * LATE / 8)
    assert got["itl_ms"]["mean"] == pytest.approx(50, abs=1e3 * LATE / 8)
    assert 700 <= got["e2el_ms"]["median"] < 700 + 1e3 * LATE
    assert got["input_tokens"] == 4 * 20, "the words were calibrated"
    assert got["most_in_flight"] == 4
    assert result["servers"][0]["version"] == "stub 1"
    assert result["command"].startswith("pagewise bench --base-url=")
    assert result["machine"]["cores"] > 0


def test_events_that_carry_several_tokens_are_said(tmp_path: Path) -> None:
    with stub_server(gap=0.06, per_event=3) as stub:
        arguments = ("--num-prompts", 2, "--random-output-len", 12)
        result = undisturbed(lambda: measured(tmp_path, *arguments, urls=(stub.url,)))
    got = one_round(result)
    assert got["tokens_per_event"] == 3
    assert got["itl_ms"]["mean"] == pytest.approx(60, abs=1e3 * LATE / 3)
    assert got["tpot_ms"]["mean"] == pytest.approx(180 / 11, abs=1e3 * LATE / 11)
    assert any("carries 3.00 tokens" in caveat for caveat in result["caveats"])


def test_goodput_counts_requests_within_bounds(tmp_path: Path) -> None:
    with stub_server(first=0.2) as stub:
        arguments = ("--num-prompts", 3, "--random-output-len", 2)
        for bound, share in ((100, 0.0), (2000, 1.0)):
            got = one_round(measured(tmp_path, *arguments, "--goodput", f"ttft:{bound}", "tpot:5000", urls=(stub.url,)))
            assert got["good_share"] == share
            assert got["goodput"] == pytest.approx(share * got["request_throughput"])


def test_requests_come_at_the_times_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    stamps = ("00.0000000", "00.4000000", "01.0000000")
    rows = "".join(f"2023-11-16 18:15:{stamp},{30 + i},2\n" for i, stamp in enumerate(stamps))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    with stub_server() as stub:
        arguments = ("--dataset-name", "trace", "--dataset-path", path)
        undisturbed(lambda: measured(tmp_path, *arguments, urls=(stub.url,)))
    came = stub.times[-3:]
    assert [round(time - came[0], 6) for time in came] == pytest.approx([0.0, 0.4, 1.0], abs=LATE)
    assert [len(words(body)) for body in stub.bodies[-3:]] == [30, 31, 32]
    assert [body["max_tokens"] for body in stub.bodies[-3:]] == [2, 2, 2]


def test_turns_wait_for_the_answer_and_carry_it(tmp_path: Path) -> None:
    options = "--dataset-name multi-turn --multi-turn-num-turns 3 --multi-turn-input-len 10 --multi-turn-output-len 2"
    with stub_server(first=0.15) as stub:
        arguments = (*options.split(), "--num-prompts", 6, "--backend", "openai-chat", "--max-concurrency", 1)
        got = one_round(measured(tmp_path, *arguments, urls=(stub.url,)))
    bodies, times = stub.bodies[-6:], stub.times[-6:]
    assert [len(body["messages"]) for body in bodies] == [1, 3, 5, 1, 3, 5], "one session after the other"
    assert bodies[2]["messages"][:3] == bodies[1]["messages"]
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": " tok tok"}
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.15
    assert (got["completed"], got["most_in_flight"]) == (6, 1)


def test_a_closed_loop_never_exceeds_its_concurrency(tmp_path: Path) -> None:
    with stub_server(first=0.05) as stub:
        arguments = ("--num-prompts", 12, "--random-output-len", 1, "--max-concurrency", 3)
        got = one_round(measured(tmp_path, *arguments, urls=(stub.url,)))
    assert got["most_in_flight"] == 3
    assert got["duration_seconds"] >= 0.2


def test_errors_are_counted_by_kind_and_left_out_of_latencies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = {3: 503, 4: "cut", 5: "error", 6: "silent", 7: 503, 8: "error object"}
    with stub_server(gap=0.001, fails=failing.get) as stub:
        arguments = ("--num-prompts", 9, "--random-output-len", 4, "--max-concurrency", 1)
        result = measured(tmp_path, *arguments, urls=(stub.url,))
    got = one_round(result)
    counted = {kind: of["count"] for kind, of in got["errors"].items()}
    assert counted == {"HTTP 503": 2, "connection broke": 1, "error in the stream": 2, "no output": 1}
    assert (got["completed"], got["failed"]) == (3, 6)
    assert all("the model fell over" in said for said in got["errors"]["error in the stream"]["examples"])
    assert any(caveat.startswith("6 of 9 requests") for caveat in result["caveats"])
    assert "2 times HTTP 503, for instance: " in capsys.readouterr().out


def test_turns_after_a_failed_one_are_not_sent(tmp_path: Path) -> None:
    with stub_server(fails={4: 500}.get) as stub:
        arguments = ("--dataset-name", "multi-turn", "--num-prompts", 3, "--multi-turn-num-turns", 3)
        got = one_round(measured(tmp_path, *arguments, urls=(stub.url,)))
    assert {kind: of["count"] for kind, of in got["errors"].items()} == {"HTTP 500": 1, "not sent": 1}


def test_no_request_that_succeeds_is_an_exit_code(tmp_path: Path) -> None:
    with stub_server(fails=lambda number: 500 if number >= 3 else None) as stub:
        assert bench(["--base-url", stub.url, "--num-prompts", "2", "--num-warmups", "0", "--disable-tqdm"]) == 1


def test_without_usage_events_are_counted_and_it_is_said(tmp_path: Path) -> None:
    with stub_server(usage=False, refuses=("stream_options", "ignore_eos")) as stub:
        result = measured(tmp_path, "--num-prompts", 2, "--random-output-len", 5, urls=(stub.url,))
    got = one_round(result)
    assert (got["output_tokens"], got["output_tokens_counted_by"], got["input_tokens"]) == (10, "events", None)
    assert any("does not tell token counts" in caveat for caveat in result["caveats"])
    assert any("refuses ignore_eos" in caveat for caveat in result["caveats"])
    assert result["servers"][0]["streams_usage"] is result["servers"][0]["ignores_eos"] is False
    assert "ignore_eos" not in stub.bodies[-1]
    assert "stream_options" not in stub.bodies[-1]


def test_outputs_that_end_early_and_prompts_that_a_cache_knew_are_said(tmp_path: Path) -> None:
    with stub_server(most=3, cached=10) as stub:
        result = measured(tmp_path, "--num-prompts", 2, "--random-output-len", 6, urls=(stub.url,))
    assert any("generated 50% of the tokens asked for" in caveat for caveat in result["caveats"])
    assert any("found 50% of the prompts in its cache" in caveat for caveat in result["caveats"])


def test_servers_are_measured_in_turns_and_compared_by_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def note(name: str, stub: Stub) -> None:
        stub.script.fails = lambda number: order.append(name) if number >= (3 if name == "fast" else 1) else None

    with stub_server(first=0.02) as fast, stub_server(first=0.1, gap=0.01) as slow:
        note("fast", fast)
        note("slow", slow)
        arguments = ("--num-prompts", 2, "--random-output-len", 3, "--rounds", 6)
        result = measured(tmp_path, *arguments, urls=(f"fast={fast.url}", f"slow={slow.url}"))
        sent = [{" ".join(words(body)) for body in stub.bodies[-12:]} for stub in (fast, slow)]
    assert order[::2] == ["fast", "slow", "slow", "fast"] * 3, "each is the first one as often"
    assert len(sent[0] | sent[1]) == 24, "no prompt comes twice, to none of them"
    ratio = result["servers"][1]["first_over_this"]["ttft_ms.median"]
    assert ratio["differs"] is True
    assert ratio["median"] < 0.8
    assert "first_over_this" not in result["servers"][0]
    printed = capsys.readouterr().out
    assert "In parentheses: fast over that server" in printed
    assert not any("rounds" in caveat for caveat in result["caveats"])


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots_are_what_their_name_says(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot.{suffix}"
    with stub_server(gap=0.005) as stub:
        arguments = ("--num-prompts", 3, "--goodput", "ttft:100", "--plot", path, "--random-output-len", 4)
        measured(tmp_path, *arguments, urls=(f"stub={stub.url}",))
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    texts = " ".join(ET.fromstring(path.read_text()).itertext())
    for expected in ("TTFT", "ITL", "E2E", "tokens/s", "SLO 100 ms", "stub"):
        assert expected in texts


def test_no_terminal_gets_lines_and_no_carriage_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server() as stub:
        measured(tmp_path, "--num-prompts", 3, "--random-output-len", 1, urls=(f"stub={stub.url}",))
        told = capsys.readouterr().err
        assert told == "stub: 3 of 3 requests, 0 s\n"
        measured(tmp_path, "--num-prompts", 3, "--random-output-len", 1, "--disable-tqdm", urls=(f"stub={stub.url}",))
        assert capsys.readouterr().err == ""


def test_details_of_requests_are_kept_if_asked_for(tmp_path: Path) -> None:
    with stub_server(gap=0.01) as stub:
        arguments = ("--num-prompts", 2, "--random-output-len", 3, "--save-detailed")
        result = measured(tmp_path, *arguments, urls=(stub.url,))
    ((first, second),) = result["servers"][0]["requests"]
    assert first["sent"] == 0.0 <= second["sent"]
    assert len(first["events"]) == first["output_tokens"] == 3
    assert first["events"] == sorted(first["events"])


def test_a_duration_bounds_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(first=0.05) as stub:
        arguments = ("--duration", 1, "--max-concurrency", 2, "--random-output-len", 1)
        result = measured(tmp_path, *arguments, urls=(f"stub={stub.url}",))
    got = one_round(result)
    assert 2 < got["completed"] <= 2 * 20
    assert (got["failed"], got["most_in_flight"]) == (0, 2)
    assert 0.9 < got["duration_seconds"] < 1.05 + 4 * LATE, "those that ran were waited for, and no others started"
    assert got["input_tokens"] == got["input_tokens_asked_for"] == 20 * got["completed"]
    assert f"stub: {got['completed']} requests, 1 of 1 s" in capsys.readouterr().err


def test_a_duration_bounds_arrivals_and_says_what_it_left_out(tmp_path: Path) -> None:
    with stub_server(first=0.6) as stub:
        arguments = ("--duration", 1, "--request-rate", 20, "--num-prompts", 100, "--random-output-len", 1)
        result = measured(tmp_path, *arguments, urls=(f"stub={stub.url}",))
    got = one_round(result)
    assert 5 < got["completed"] < 40
    assert stub.times[-1] - stub.times[-got["completed"]] < 1 + LATE
    assert f"{100 - got['completed']} of 100 requests to stub did not start within 1 s" in result["caveats"]
    assert any("after the 1 s of --duration" in caveat for caveat in result["caveats"])


def test_a_duration_ends_sessions_between_their_turns(tmp_path: Path) -> None:
    options = "--dataset-name multi-turn --multi-turn-num-turns 9 --think-time 0.2 --multi-turn-output-len 1"
    with stub_server() as stub:
        arguments = (*options.split(), "--duration", 1, "--max-concurrency", 3, "--backend", "openai-chat")
        got = one_round(measured(tmp_path, *arguments, urls=(stub.url,)))
    assert (got["failed"], got["errors"]) == (0, {}), "what did not start is no failure"
    assert 3 < got["completed"] < 60
    assert got["duration_seconds"] < 1 + LATE


def test_a_duration_cuts_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:0{second}.0000000,30,2\n" for second in range(9))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    with stub_server() as stub:
        arguments = ("--dataset-name", "trace", "--dataset-path", path, "--trace-speed", 4, "--duration", 1)
        result = measured(tmp_path, *arguments, urls=(f"stub={stub.url}",))
    assert one_round(result)["completed"] == 4
    assert "5 of 9 requests to stub did not start within 1 s" in result["caveats"]


def test_servers_that_call_their_models_differently_and_list_others_or_none(tmp_path: Path) -> None:
    with stub_server(models=("this",)) as one, stub_server(models=("that",), lists=500) as other:
        arguments = ("--num-prompts", 1, "--random-output-len", 2, "--model", "this", "--model", "that")
        result = measured(tmp_path, *arguments, urls=(one.url, other.url))
    assert [server["model"] for server in result["servers"]] == ["this", "that"]
    assert all(server["rounds"][0]["completed"] == 1 for server in result["servers"])


def test_streams_of_other_shapes_are_read(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"done": False, "usage": False, "last_chunk_usage": True, "refuses": ("ignore_eos",)}
    with stub_server() as usual, stub_server(**shape) as other:
        arguments = ("--num-prompts", 2, "--random-output-len", 3, "--backend", "openai-chat")
        result = measured(tmp_path, *arguments, urls=(usual.url, other.url))
    first, second = (server["rounds"][0] for server in result["servers"])
    names = ("completed", "input_tokens", "output_tokens", "output_tokens_counted_by")
    assert [first[name] for name in names] == [second[name] for name in names] == [2, 40, 6, "usage"]
    said = " ".join(result["caveats"])
    assert "refuses ignore_eos" in said
    assert "outputs may differ in length" not in said, "they did not"
