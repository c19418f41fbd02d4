"""Models with several groups of layers by CUDA graphs: replays of recorded captures give the tokens of transformers.

Memory that a step has to write before it reads it is poisoned before each replay.
"""

from pathlib import Path

import pytest
import torch
from pagewise_executor import model_runner
from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import load_model
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.profile import dummy_prefill
from pagewise_executor.warm_up import warm_up
from pagewise_kernels.attention.config import LARGEST_TILE
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import Welcome

from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.cuda_graphs.recorded import BLOCK, TOKENS, build, check_replays, poison
from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted


def poison_tables(runner: ModelRunner) -> None:
    """Overwrite the results of a replay, and let table entries that no query sees name a page of NaN."""
    bad, batch = poison(runner)
    assert runner._graphs is not None
    backend = runner._graphs.decodes._backend
    for plan in backend._plans.values():
        plan.parts.values.fill_(torch.nan)
        plan.units.fill_(2**20)
    tile = -(-LARGEST_TILE // BLOCK)
    for number, group in enumerate(backend.tables.groups):
        width = group.on_device.shape[2]
        unseen = torch.ones(group.on_device.shape[1:], dtype=torch.bool)
        for row in batch.sequences:
            first = max(0, int(batch._windows[number - 1].first[row]) - tile) if number else 0
            unseen[row, torch.arange(first, int(batch.ends[number][row])) % width] = False
        group.on_device[:, unseen] = bad


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(one, marks=pytest.mark.long) for one in ("gpt_oss", "llama4"))]
)
def test_replays_give_the_tokens_of_transformers(family: str, tmp_path: Path, recorded: FakeCuda) -> None:
    """Requests come and go, with prefix hits and chunks, and with contexts that are longer than tables of windows.

    Attention chunks begin with a tile, so Llama 4's are longer here.
    """
    shape = {"attention_chunk_size": LARGEST_TILE} if family == "llama4" else {}
    runner = check_replays(
        family, tmp_path, recorded, poison_tables, (71, 75), [9, 12, 6, 8], num_blocks=21, most_blocks=60, **shape
    )
    assert len(runner.info.groups) > 1
    assert runner._graphs is not None
    windowed = runner._graphs.decodes._backend.tables.groups[1]
    assert windowed.ring
    assert windowed.on_device.shape[2] * BLOCK < 71
    assert recorded.replayed > 20


def test_a_start_measures_captures_and_warms_up(
    tmp_path: Path, recorded: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool with room for two steps, of which a block of all layers takes four pages."""
    build_model("olmo3", tmp_path)
    options = {"max_model_len": 96, "max_num_seqs": 4, "num_blocks": 8}
    config = with_step_limits(
        ExecutorConfig(
            model=str(tmp_path), device="cpu", kernels="triton", block_size=BLOCK, profile=False,
            max_num_batched_tokens=TOKENS, **options,
        ),
        None,
    )  # fmt: skip
    loaded = load_model(config)
    monkeypatch.setattr(model_runner, "load_model", lambda *_: loaded)
    runner = ModelRunner(config)
    graphs = runner._graphs
    assert graphs is not None
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    runner._measure_activations(config, loaded, torch.float32)
    backend = graphs.decodes._backend
    assert len(backend._plans) == 2, "one for each group, with its scratch, which layers in all slots share"
    assert [len(group.on_device) for group in backend.tables.groups] == [1, 3]
    runner._size_pool(config, loaded, torch.float32)
    runner._capture(graphs, config)
    assert not runner.info.fallback
    assert len(recorded.captures) == graphs.num_graphs
    sizes: list[list[int]] = []
    execute = runner.execute
    monkeypatch.setattr(
        runner, "execute", lambda plan: (sizes.append([size for _, size in plan.chunks]), execute(plan))[1]
    )
    warm_up(runner, runner._pool, torch.float32, 2 * TOKENS, TOKENS - 3)
    assert sizes == [[4] * 4, [8] * 2, [16], [32]], "as many tokens as all groups have pages for"


def test_a_window_that_is_larger_than_its_table_is_refused(tmp_path: Path) -> None:
    build_model("gpt_oss", tmp_path, num_hidden_layers=2)
    runner = build(tmp_path)
    runner.reset(Welcome(0, 1, 128, keeps_blocks=True))
    with pytest.raises(InvalidPlanError, match="needs 21 blocks of its window at once, of 16 at most"):
        dummy_prefill(runner, 0, 65)
