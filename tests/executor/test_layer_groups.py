"""Groups of layers and their pages."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.device_defaults import STEPS_IN_FLIGHT
from pagewise_executor.group_choice import groups_of, layout_of_layers
from pagewise_executor.kv.kv_pool import KVShape, bytes_per_block
from pagewise_executor.kv.layer_groups import Group, KVLayerKind, PageLayout, StateGroup, page_layout, single_group
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.server.executor_handle import MAX_STEPS_IN_FLIGHT
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import LayerGroup

from tests.causal_lm_tables import REAL, memory_of


def layout_of(kinds: list[KVLayerKind], max_model_len: int = 131072) -> PageLayout | None:
    return page_layout(kinds, 16, torch.bfloat16, max_model_len)


def alternating(
    full: int, windowed: int, shape: KVShape, window: int, full_shape: KVShape | None = None
) -> list[KVLayerKind]:
    return [KVLayerKind(full_shape or shape)] * full + [KVLayerKind(shape, window)] * windowed


PAGES = {
    "Llama 4 Scout": (1, 3),
    "Qwen3-Next 80B-A3B": (1, 198),
    "Kimi-Linear 48B-A3B": (1, 417),
    "Gemma 3 4B": (5, 29),
    "Gemma 3 12B": (1, 5),
    "Gemma 3 27B": (5, 26),
    "Gemma 4 26B-A4B": (1, 13),
    "Gemma 4 31B": (1, 17),
    "OLMo 3 7B": (1, 3),
    "gpt-oss 20B": (1, 1),
    "gpt-oss 120B": (1, 1),
}
"""The pages of a block in each group, that of states last, of the models of docs/models.md that have several groups."""
EMPTY = {"Gemma 4 26B-A4B": (0.22, 0.04), "Gemma 4 31B": (0.0, 0.06)}
"""The share of a block in each group that is empty, where no page fits all groups, as docs/limits.md says."""
QUICK = (*EMPTY, "Llama 4 Scout", "gpt-oss 20B")
"""These are tried in the suite: building the layers of all takes a minute."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one not in QUICK)) for one in REAL])
def test_pages_waste_at_most_2_percent(name: str) -> None:
    kinds, states = memory_of(name)
    layout = page_layout(kinds, 16, torch.bfloat16, 131_072, states)
    assert (layout is not None) == (name in PAGES)
    if layout is None:
        return
    pages = [group.pages_per_block for group in layout.groups]
    sizes = [bytes_per_block([kinds[one].shape for one in group.layers], 16, torch.bfloat16) for group in layout.groups]
    if layout.states is not None:
        pages.append(layout.states.pages_per_block)
        sizes.append(sum(states))
    assert tuple(pages) == PAGES[name]
    empty = [1 - size / (count * layout.page_bytes) for count, size in zip(pages, sizes, strict=True)]
    assert layout.waste == max(empty)
    if name in EMPTY:
        assert empty == pytest.approx(EMPTY[name], abs=0.005)
    else:
        assert layout.waste <= 0.02
    assert sorted(index for group in layout.groups for index in group.layers) == list(range(len(kinds)))


@pytest.mark.parametrize(
    ("both", "once", "pages", "shares"),
    [
        pytest.param(
            alternating(10, 50, (16, 256), 1024, (4, 512)), alternating(10, 50, (16, 256), 1024, (4, 640, 512, 512)),
            (1, 17), (1.03, 0.95, 0.67), id="Gemma 4 31B",
        ),
        pytest.param(
            alternating(5, 25, (8, 256), 1024, (2, 512)), alternating(5, 25, (8, 256), 1024, (2, 640, 512, 512)),
            (1, 13), (0.94, 0.88, 0.69), id="Gemma 4 26B",
        ),
    ],
)  # fmt: skip
def test_layers_that_store_k_and_v_once_save_memory_though_pages_do_not_fit(
    both: list[KVLayerKind], once: list[KVLayerKind], pages: tuple[int, ...], shares: tuple[float, ...]
) -> None:
    before, after = layout_of(both), layout_of(once)
    assert before is not None
    assert after is not None
    assert tuple(group.pages_per_block for group in after.groups) == pages
    for tokens, most in zip((1024, 4096, 131_072), shares, strict=True):
        assert after.pages_for(tokens) * after.page_bytes <= most * before.pages_for(tokens) * before.page_bytes


def test_states_lie_in_pages_of_the_other_layers() -> None:
    """Of Qwen3-Next 80B: 12 layers with attention, and 36 with a conv state and a recurrent one in float32."""
    states = [8192 * 4 * 2 + 32 * 128 * 128 * 4] * 36
    layout = page_layout([KVLayerKind((2, 256))] * 12, 16, torch.bfloat16, 262_144, states)
    assert layout is not None
    assert layout.states == (36, sum(states), 198)
    assert (layout.page_bytes, layout.groups[0].pages_per_block) == (12 * 16 * 2 * 2 * 256 * 2, 1)
    assert layout.waste <= 0.02
    assert layout.pages_for(16_384) == 1024 + 4 * 198


def test_models_whose_layers_all_see_the_same_tokens_have_one_group() -> None:
    assert layout_of([KVLayerKind((8, 128))] * 32) is None
    assert layout_of([KVLayerKind((8, 128), 4096)] * 32) is None
    assert layout_of([KVLayerKind((8, 128)), KVLayerKind((8, 128), 4096)], max_model_len=4096) is None


def test_without_full_layers_the_largest_window_counts_as_full() -> None:
    layout = layout_of([KVLayerKind((8, 128), 4096), KVLayerKind((8, 128), 512)])
    assert layout is not None
    assert [group.window for group in layout.groups] == [0, 512]


def test_layers_of_unequal_shapes_that_see_the_same_tokens_are_not_grouped() -> None:
    assert layout_of([KVLayerKind((8, 128)), KVLayerKind((8, 64)), KVLayerKind((8, 128), 512)]) is None


def manager(layout: PageLayout, num_pages: int, in_flight: int) -> GroupedKVCacheManager:
    """The scheduler's memory of such a model."""
    full, *windowed = layout.groups
    windows = tuple(WindowShape(group.window, group.pages_per_block) for group in windowed)
    if layout.states is not None:
        windows += (WindowShape(2, layout.states.pages_per_block, state=True),)
    shape = ArenaShape(num_pages, full.pages_per_block, windows, in_flight)
    return GroupedKVCacheManager(shape, layout.block_size)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from((0, 0, 1, 7, 16, 100, 1024)), min_size=2, max_size=12),
    st.integers(12, 3000), st.integers(1, 400), st.integers(1, 5000), st.lists(st.integers(1, 200_000), max_size=3),
)  # fmt: skip
def test_the_scheduler_counts_the_same_pages(
    windows: list[int], num_pages: int, in_flight: int, tokens: int, states: list[int]
) -> None:
    kinds = [KVLayerKind((8, 128), window) for window in windows]
    layout = page_layout(kinds, 16, torch.bfloat16, 131072, states)
    if layout is None:
        layout = single_group([(8, 128)] * len(windows), 16, torch.bfloat16)
    kv = manager(layout, num_pages, in_flight)
    assert kv.room_for(tokens) == layout.pages_for(tokens, in_flight)
    assert kv.capacity_tokens == layout.longest_sequence(num_pages, in_flight)
    fitting = layout.sequences_that_fit(num_pages, tokens, in_flight)
    assert (fitting >= 1) == (tokens <= kv.capacity_tokens)
    if fitting >= 1:
        assert layout.pages_for_all(int(fitting), tokens, in_flight) <= num_pages
        assert layout.pages_for_all(int(fitting) + 1, tokens, in_flight) > num_pages


def test_executor_and_scheduler_agree_on_the_steps_in_flight() -> None:
    assert STEPS_IN_FLIGHT == MAX_STEPS_IN_FLIGHT


def test_a_long_sequence_of_gemma_3_27b_takes_a_sixth() -> None:
    kinds = alternating(10, 52, (16, 128), 1024)
    layout = layout_of(kinds)
    assert layout is not None
    whole = single_group([one.shape for one in kinds], 16, torch.bfloat16)
    before = whole.pages_for(131_072) * whole.page_bytes
    assert layout.pages_for(131_072) * layout.page_bytes < before / 5.9
    assert layout.pages_for(131_072, 2 * 2048) * layout.page_bytes < before / 5


def test_the_scheduler_is_told_of_latents_and_states() -> None:
    latents = Group(layers=(0, 1), shape=(1, 40, 32), window=0, chunked=False, layers_per_page=2)
    pages = PageLayout((latents,), page_bytes=4096, waste=0.0, block_size=16, states=StateGroup(6, 9000, 3))
    assert groups_of(pages) == (LayerGroup(2, 1, latent=True), LayerGroup(6, 3, window=2, state=True))


def test_layers_are_grouped_by_what_they_keep() -> None:
    """A model's chunks go before its windows. Unequal layers cannot lie beside states, and do without."""
    config = ExecutorConfig()
    full = AttentionShape(8, 2, 64, torch.bfloat16, 0.1)
    chunked = replace(full, attention_chunk=512, window=128)
    found = layout_of_layers(config, [full, chunked], torch.bfloat16, 4096, ())
    assert found is not None
    assert [(group.window, group.chunked) for group in found.groups] == [(0, False), (512, True)]
    unequal = [full, replace(full, kv_heads=4)]
    assert layout_of_layers(config, unequal, torch.bfloat16, 4096, ()) is None
    with pytest.raises(ModelError, match="recurrent layers beside layers with K and V of unequal shapes"):
        layout_of_layers(config, unequal, torch.bfloat16, 4096, [4096])
