"""The benchmark of serving: its requests, and its servers."""

import pytest

from benchmarks.processes import serving
from benchmarks.serving.contenders import contender
from benchmarks.serving.workloads import WORKLOADS, workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_rounds_ask_for_as_much_and_for_other_prompts(name: str) -> None:
    first, again, other = workload(name, 8, 0), workload(name, 8, 0), workload(name, 8, 1)
    assert first == again
    beside = workload(name, 8, 0, "busy")
    assert len(first) == len(other) == 8
    for others in (other, beside):
        assert not {tuple(work.prompt[:16]) for work in first} & {tuple(work.prompt[:16]) for work in others}
    assert [(len(work.prompt), work.output) for work in beside] == [(len(w.prompt), w.output) for w in first]
    if name == "prefix":
        assert len({tuple(work.prompt[:512]) for work in first}) == 1
        assert len({tuple(work.prompt) for work in first}) == 8


def test_any_server_of_the_api_takes_part_by_its_url() -> None:
    with serving("--simulate") as server:
        one = contender(f"{server.url}#{server.process.pid}", "", "cpu", "float32", "pagewise-demo")
        works = workload("outputs", 4)
        taken = one.round(works, None, 0)
        one.close()
        assert len(taken.first_token) == 4
        assert taken.cpu_seconds is not None
        assert 0 < taken.cpu_seconds < taken.seconds * 16
        assert contender(server.url, "", "cpu", "float32").round(works[:1], None, 0).cpu_seconds is None
    with pytest.raises(ValueError, match="there is no contender 'vllm': there are pagewise, generate, "):
        contender("vllm", "", "cpu", "float32")
