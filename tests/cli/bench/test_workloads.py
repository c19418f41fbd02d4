"""What workloads ask for, before any of it is sent."""

import itertools
import json
import random
import statistics
from pathlib import Path

import pytest
from pagewise.bench.options import parse
from pagewise.bench.texts import Texts, Words, calibrate
from pagewise.bench.workloads import Workload, WorkloadError, arrivals, longest_tokens, plan, turns

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"


def planned(*arguments: object) -> Workload:
    return plan(parse([str(argument) for argument in arguments]))


def texts(sessions: Workload, salt: str = "salt") -> list[str]:
    made = Texts(salt, tokens_per_word=1.0)
    return [made.text(turn.parts, first=not turn.continues) for turn in turns(sessions)]


def test_random_prompts_share_their_prefix_and_nothing_else() -> None:
    sessions = planned(
        "--num-prompts", 20, "--random-input-len", 40, "--random-prefix-len", 24, "--random-range-ratio", 0.5
    )
    made = [text.split() for text in texts(sessions)]
    assert len({tuple(one[:24]) for one in made}) == 1
    assert len({tuple(one[24:40]) for one in made}) == 20
    assert all(20 + 24 <= len(one) <= 60 + 24 for one in made)
    assert len({len(one) for one in made}) > 5
    assert all(64 <= session.output_tokens <= 192 for session in sessions)


def test_lengths_depend_on_the_seed_and_words_on_the_salt() -> None:
    first, again, other = (
        planned("--num-prompts", 8, "--random-range-ratio", 0.9, "--seed", seed) for seed in (1, 1, 2)
    )
    assert texts(first) == texts(again) != texts(other)
    assert [len(a.split()) for a in texts(first)] == [len(b.split()) for b in texts(first, "another")]
    assert not set(texts(first)) & set(texts(first, "another"))


def test_groups_ask_as_many_questions_each() -> None:
    names = ("prefix-len", "suffix-len", "num-prefixes", "output-len")
    options = [
        part for name, n in zip(names, (30, 10, 4, 7), strict=True) for part in (f"--prefix-repetition-{name}", n)
    ]
    sessions = planned("--dataset-name", "prefix_repetition", "--num-prompts", 20, *options)
    made = [text.split() for text in texts(sessions)]
    groups = [tuple(one[:30]) for one in made]
    assert sorted(groups.count(group) for group in set(groups)) == [5] * 4
    assert groups[:4] != groups[4:8], "not one after the other"
    assert {len(one) for one in made} == {40}
    assert {session.output_tokens for session in sessions} == {7}


def test_sessions_have_turns_that_follow_each_other() -> None:
    sessions = planned(
        "--dataset-name", "multi-turn", "--num-prompts", 200, "--think-time", 2, "--multi-turn-prefix-len", 9
    )
    assert len(list(sessions)) == 40
    for session in sessions:
        chain = list(turns([session]))
        assert [turn.continues for turn in chain] == [False, True, True, True, True]
        assert [len(turn.following) for turn in chain] == [1, 1, 1, 1, 0]
    pauses = [turn.delay for turn in turns(sessions) if turn.continues]
    assert statistics.mean(pauses) == pytest.approx(2, rel=0.3)
    assert longest_tokens(sessions) == 9 + 5 * (128 + 128)


def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = list(itertools.islice(arrivals(10.0, burstiness, random.Random(3)), 20_000))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
        # Of a gamma distribution the standard deviation over the mean is 1 / sqrt(shape).
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
    assert list(itertools.islice(arrivals(float("inf"), 1.0, random.Random(0)), 3)) == [0.0] * 3


@pytest.mark.parametrize("name", ["random", "sharegpt", "prefix_repetition", "multi-turn"])
def test_with_a_duration_there_are_sessions_without_end_and_always_the_same(name: str) -> None:
    options = ("--dataset-name", name, "--duration", 60, "--request-rate", 2)
    endless, finite = planned(*options), planned(*options, "--num-prompts", 500)
    assert (endless.total, finite.total) == (None, 500)
    many = endless.first(300)
    assert endless.first(300) == many, "each round and each server gets the same ones"
    assert [session.delay for session in many] == sorted(session.delay for session in many)
    if name != "prefix_repetition":
        assert many[:100] == finite.first(100)
        return
    prefixes = [session.parts[0] for session in many]
    assert {prefixes.count(prefix) for prefix in prefixes} == {30}
    assert len({session.parts[1] for session in many}) == 300


def test_lengths_like_sharegpt_s_ship_with_the_package() -> None:
    sessions = planned("--dataset-name", "sharegpt", "--num-prompts", 2000)
    assert statistics.median(turn.prompt_tokens for turn in sessions) == pytest.approx(1730, rel=0.2)
    assert statistics.median(turn.output_tokens for turn in sessions) == pytest.approx(415, rel=0.2)
    tenth = planned("--dataset-name", "sharegpt", "--num-prompts", 2000, "--length-scale", 0.1)
    assert [turn.output_tokens for turn in tenth] == [max(1, round(turn.output_tokens / 10)) for turn in sessions]


def test_texts_of_a_file_are_sent_behind_a_salt(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two"}\n')
    sessions = planned("--dataset-name", "custom", "--dataset-path", lines, "--custom-output-len", 9)
    assert sorted(turn.output_tokens for turn in sessions) == [3, 9]
    assert sorted(texts(sessions, "x")) == ["[x] one", "[x] two"]
    chats = tmp_path / "sharegpt.json"
    said = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi. " * 20}]
    chats.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
    (turn,) = planned("--dataset-name", "sharegpt", "--dataset-path", chats)
    assert (turn.parts, turn.output_tokens) == (["Hello"], 20)


def test_a_trace_keeps_its_times_and_its_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(7000, 1100, 5, [1, 2, 3]), (9000, 1300, 6, [1, 2, 4]), (10_000, 600, 7, [])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    sessions = planned("--dataset-name", "trace", "--dataset-path", path, "--trace-speed", 2)
    assert [session.delay for session in sessions] == [0.0, 1.0, 1.5]
    first, second, third = (text.split() for text in texts(sessions))
    assert [len(first), len(second), len(third)] == [1100, 1300, 600]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert first[:300] != third[:300]


def test_sessions_of_an_agentic_trace_wait_for_each_other() -> None:
    path = TRACES / "cc_agentic_max64k_min10req.rle.jsonl.gz"
    sessions = planned("--dataset-name", "trace", "--dataset-path", path, "--num-prompts", 60)
    assert len(list(sessions)) < 60 == sessions.total
    assert not any(turn.continues for turn in turns(sessions)), "the trace's blocks are the whole prompt"


@pytest.mark.parametrize("text", ["", "{}\n", "[1]", '{"prompt": ', '{"conversations": []}\n'])
def test_a_file_that_holds_nothing_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    for name in ("custom", "trace"):
        with pytest.raises(WorkloadError, match=r"bad\.jsonl"):
            planned("--dataset-name", name, "--dataset-path", path)


def test_a_prompt_has_the_tokens_that_were_asked_for() -> None:
    per_word, overhead = calibrate((1, 12), (201, 312))
    assert (per_word, overhead) == (1.5, 10.5)
    made = Texts("s", tokens_per_word=per_word, overhead=overhead)
    parts = [Words("a", 400), Words("b", 200)]
    assert overhead + per_word * len(made.text(parts).split()) == pytest.approx(600, abs=2)
    assert per_word * len(made.text(parts, first=False).split()) == pytest.approx(600, abs=2)
    assert calibrate((1, 5), (201, 5)) == (1.3, 0.0), "a server that counts something else"
