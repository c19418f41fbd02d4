"""An executor with several groups of layers, whose plans a test makes, because schedulers make others."""

import queue

import numpy as np
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.tiers.block_names import chain
from pagewise_shared.block_hash import BlockHash, root_hash
from pagewise_shared.protocol import DEVICE, Copied, pack_int32s

from tests.executor.runners import BLOCK_SIZE


class PlayedRunner:
    """A runner, and ``copied``: the lists of copies that it confirms."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.copied: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        runner.report_to(self.copied.put)  # type: ignore[arg-type]

    @property
    def root(self) -> BlockHash:
        """The root of the block hashes of prompts."""
        return root_hash(self.runner.info.model_fingerprint)

    def hashes(self, tokens: list[int]) -> list[BlockHash]:
        """The hashes of the full blocks of a prompt."""
        return [name.hash for name in chain(self.root, pack_int32s(tokens), BLOCK_SIZE)]

    def content(self, group: int, block: int) -> np.ndarray:
        """The pages of a block of the device [pages, page bytes]."""
        batch = self.runner._batch
        assert isinstance(batch, GroupedBatch)
        pages = batch._maps[DEVICE].pages(group, np.array([block], np.int32))[0]
        assert pages.all()
        return self.runner._pool.gather(pages).copy()  # type: ignore[no-any-return]
