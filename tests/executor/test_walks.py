"""Random walks through conversations with models of several groups of layers: no token is wrong."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pagewise_scheduler.core.tiers.peer import PrefixDirectory

from tests.executor.walks import Member, Walk
from tests.model_builders import FEW_LAYERS, build_model


def walk(
    family: str, path: Path, num_requests: int, seed: int, *, members: int, disk: bool, host_memory: str | None
) -> Counter[str]:
    """Check a walk, and return the counts of events of the blocks of all executors."""
    build_model(family, path / family, seed=7, **FEW_LAYERS[family])
    rng, directory = random.Random(seed), PrefixDirectory()
    options: dict[str, Any] = {"num_blocks": 600, "host_memory": host_memory}
    options |= {"disk_cache": str(path / "disk")} if disk else {}
    fleet = [Member(path / family, directory, rng, rng.uniform(1.1, 1.8), **options) for _ in range(members)]
    walked = Walk(path / family, seed, fleet)
    walked.run(num_requests)
    for member in fleet:
        member.runner.close()
    num_tokens, difference = walked.check()
    counts = sum((Counter(member.counts) for member in fleet), Counter[str]())
    print(f"{family}: {num_requests} requests, {num_tokens} tokens, logprobs differ by {difference:.1e}: {counts}")
    assert num_tokens > 5 * num_requests
    assert counts["corrupt"] == 0
    return counts


@pytest.mark.parametrize("family", FEW_LAYERS)
def test_conversations_at_random(family: str, tmp_path: Path) -> None:
    counts = walk(family, tmp_path, 80, 1, members=1, disk=False, host_memory="100KiB")
    assert min(counts[name] for name in ("snapshots_used", "evicted", "demoted", "hits")) > 0


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(20))
def test_conversations_at_length(seed: int, tmp_path: Path) -> None:
    """20,000 requests in all."""
    rng, family = random.Random(seed), [*FEW_LAYERS][seed % len(FEW_LAYERS)]
    host_memory = rng.choice((None, "60KiB", "300KiB"))
    members, disk = (2, True) if seed < 5 else (rng.choice((1, 1, 2)), rng.random() < 0.3)
    counts = walk(family, tmp_path, 1000, seed, members=members, disk=disk, host_memory=host_memory)
    assert min(counts[name] for name in ("preempted", "snapshots_used", "evicted", "hits")) > 0
    assert counts["fetched"] > 0 or members == 1 or disk  # the disk has most blocks as well
    assert counts["recalled"] > 0 or not disk
    assert counts["loaded"] > 0 or host_memory is None
