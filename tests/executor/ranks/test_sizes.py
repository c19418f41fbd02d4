"""All ranks have the sizes of the one that has the least room, and none is faster than the slowest."""

from itertools import count
from pathlib import Path

import pytest
from pagewise_executor import model_runner

from tests.executor.ranks.groups import ThreadGroup
from tests.model_builders import build_model


def test_ranks_agree_on_blocks_and_on_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    rooms = count(12, -1)  # each rank finds less than the one before, and less each time it looks
    monkeypatch.setattr(model_runner, "pool_size", lambda *_: next(rooms))
    group = ThreadGroup(tmp_path, 2, max_model_len="auto", num_blocks=None)
    first, second = group.runners
    assert (first._longest, second._longest) == (11 * 8, 11 * 8)
    assert [runner.info.num_blocks for runner in group.runners] == [9, 9]
    assert [runner.info.max_model_len for runner in group.runners] == [9 * 8, 9 * 8]
    group.close()


def test_an_executor_is_as_slow_as_its_slowest_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    choose = model_runner.choose_engine

    def choose_engine(config, loaded, *others):  # type: ignore[no-untyped-def]
        loaded.fallback = loaded.ranks.rank == 1
        return choose(config, loaded, *others)

    monkeypatch.setattr(model_runner, "choose_engine", choose_engine)
    group = ThreadGroup(tmp_path, 2)
    assert group.info.fallback
    group.close()
