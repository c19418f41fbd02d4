"""The KV of well-known models at their real sizes, by hand from the values that their configurations publish."""

from typing import Any, NamedTuple, TypeVar

import torch
from pagewise_executor.kv.kv_pool import bytes_per_block
from pagewise_executor.kv.layer_groups import KVLayerKind, PageLayout, page_layout, single_group
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.server.executor_handle import MAX_STEPS_IN_FLIGHT

BLOCK_SIZE = 16
LONGEST = 131_072
SchedulerT = TypeVar("SchedulerT", bound=Scheduler)


class Model(NamedTuple):
    """``layers``: as they are stored. ``before``: bytes of a token with one group of layers."""

    layers: list[KVLayerKind]
    before: int

    @property
    def layout(self) -> PageLayout:
        """Its groups and pages."""
        layout = page_layout(self.layers, BLOCK_SIZE, torch.bfloat16, LONGEST)
        return layout or single_group([one.shape for one in self.layers], BLOCK_SIZE, torch.bfloat16)


def _model(*layers: tuple[int, KVLayerKind], before: int = 0) -> Model:
    kinds = [kind for count, kind in layers for _ in range(count)]
    return Model(kinds, before or bytes_per_block([kind.shape for kind in kinds], 1, torch.bfloat16))


MODELS = {
    "Gemma 3 27B": _model((10, KVLayerKind((16, 128))), (52, KVLayerKind((16, 128), 1024))),
    # Of the first ten, K and V of 512 numbers each overlap in a vector of 640.
    "Gemma 4 31B": _model(
        (10, KVLayerKind((4, 640, 512, 512))),
        (50, KVLayerKind((16, 256), 1024)),
        before=(10 * 4 * 512 + 50 * 16 * 256) * 2 * 2,
    ),
    "gpt-oss-20b": _model((12, KVLayerKind((8, 64))), (12, KVLayerKind((8, 64), 128))),
    "gpt-oss-120b": _model((18, KVLayerKind((8, 64))), (18, KVLayerKind((8, 64), 128))),
    # Expanded, 128 heads have keys of 192 numbers and values of 128.
    "DeepSeek V3": _model((61, KVLayerKind((1, 576, 512))), before=61 * 128 * (192 + 128) * 2),
    "Qwen3-30B-A3B": _model((48, KVLayerKind((4, 128)))),
}


def scheduler_of(
    model: Model, num_bytes: int, step_tokens: int, *, grouped: bool, kind: type[SchedulerT], **options: Any
) -> SchedulerT:
    """A scheduler whose executor has ``num_bytes`` bytes for the KV of a model, in groups or with full tables."""
    layout, shape = model.layout, None
    num_blocks = num_bytes // (BLOCK_SIZE * model.before)
    if grouped:
        full, *windowed = layout.groups
        num_pages = num_bytes // layout.page_bytes
        num_blocks = num_pages // full.pages_per_block
        windows = tuple(WindowShape(one.window, one.pages_per_block) for one in windowed)
        in_flight = MAX_STEPS_IN_FLIGHT * step_tokens
        shape = ArenaShape(num_pages, full.pages_per_block, windows, in_flight) if windowed else None
    return kind(
        num_blocks=max(1, num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=1024,
        max_num_batched_tokens=step_tokens,
        shape=shape,
        **options,
    )
