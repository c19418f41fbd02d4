"""A runner that finds out whether anything is read of memory that holds nothing."""

from collections.abc import Iterator

import pytest
import torch
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.page_map import NULL_PAGE
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import DEVICE, StepPlan, unpack_int32s


class PoisonedRunner(ModelRunner):
    """A runner of a model with several groups of layers, whose free blocks hold NaN: before each step, the scheduler's
    free blocks on the device that the plan does not name. ``most_poisoned``: most pages at once."""

    most_poisoned = 0

    def attend_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Serve the scheduler that is made next."""
        self._poisoned: set[int] = set()
        made = Scheduler.__init__

        def remember(scheduler: Scheduler, **options: object) -> None:
            made(scheduler, **options)  # type: ignore[arg-type]
            self._scheduler = scheduler

        monkeypatch.setattr(Scheduler, "__init__", remember)

    def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        batch, kv = self._batch, self._scheduler.kv
        assert isinstance(batch, GroupedBatch)
        free = {(0, block) for block in kv.pool._free}
        free |= {(group.number, block) for group in kv.windows for block in group._free}
        pages: set[int] = set()
        for group, block in free - set(_named(plan)):
            pages |= set(batch._on_device._pages[group][block].tolist())
        pages.discard(NULL_PAGE)
        memory = self._pool.regions[0][0].view(torch.float32)
        memory[sorted(self._poisoned - pages)] = 0.0
        memory[sorted(pages - self._poisoned)] = torch.nan
        self._poisoned = pages
        self.most_poisoned = max(self.most_poisoned, len(pages))
        return super().execute(plan)


def _named(plan: StepPlan) -> Iterator[tuple[int, int]]:
    """The groups and blocks of the device that a plan names."""
    for new in plan.joined:
        for group, blocks in enumerate((new.blocks, *(blocks for _, blocks in new.windows))):
            yield from ((group, block) for block in unpack_int32s(blocks))
    yield from ((0, block) for block in unpack_int32s(plan.tables)[2::3])
    added = unpack_int32s(plan.windows)
    yield from zip(added[1::3], added[2::3], strict=True)
    for copies in plan.copies:
        # Numbers of other tiers, too: a few more blocks than needed are left alone.
        yield from ((copies.group, block) for block in unpack_int32s(copies.pairs))
    unmapped = unpack_int32s(plan.unmapped).tolist()
    for tier, group, block in zip(unmapped[::3], unmapped[1::3], unmapped[2::3], strict=True):
        if tier == DEVICE:
            yield group, block
