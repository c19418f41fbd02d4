"""An executor on a device in simulated time: the real worker, copier and host tier, and steps that take their time."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.issued_step import IssuedStep
from pagewise_executor.kv.issuing import Issuing
from pagewise_executor.step_work import Int32s
from pagewise_executor.tiers.block_copier import BlockCopier
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_executor.tiers.host import HostTier
from pagewise_executor.tiers.host_memory import HostMemory
from pagewise_shared.protocol import HOST, Hello, StepPlan, TierInfo, Welcome

from tests.executor.streams.device import Device, Operation, Rows


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: of the host before it has issued its first kernel, and in all; of the device, of a step, of
    each token, and of one token attending to one."""

    begin: float
    issue: float
    step: float
    token: float
    attention: float
    uploads: int = 2


class HostRows(HostMemory):
    """Host memory whose blocks are cells of a list."""

    def __init__(self, device: Device, num_blocks: int, bytes_per_block: int) -> None:
        super().__init__(num_blocks, 1, cuda=False)
        self._rows = Rows(device, [None] * num_blocks, bytes_per_block, True, list(range(num_blocks)))

    def slot(self, block: int) -> Any:
        return self._rows[block]

    def rows(self, first: int, count: int) -> Any:
        return self._rows[first : first + count]


class Pool:
    """Replaces ``KVPool``."""

    def __init__(self, device: Device, num_blocks: int, block_size: int, bytes_per_block: int) -> None:
        self.device = torch.device("cuda", 0)
        self.num_blocks, self.block_size, self.bytes_per_block = num_blocks, block_size, bytes_per_block
        self.cells: list[Any] = [None] * num_blocks
        self.copied: Any = None
        self._device = device

    def on_device(self, ids: Int32s) -> Int32s:
        self._device.machine.spend(self._device.speeds.call)
        self._device.issue(Operation("in", self._device.speeds.copy_setup, name="ids"))
        return ids

    def _rows(self, blocks: Any) -> Rows:
        return Rows(self._device, self.cells, self.bytes_per_block, False, [int(block) for block in blocks])

    def staging(self, count: int) -> Rows:
        self._device.machine.spend(self._device.speeds.call)
        return Rows(self._device, [None] * count, self.bytes_per_block, False, list(range(count)))

    def gather(self, blocks: Int32s) -> Rows:
        staged = self.staging(len(blocks))
        self.gather_into(blocks, staged)
        return staged

    def gather_into(self, blocks: Int32s, staged: Rows) -> None:
        self._move(self._rows(blocks), staged, "gather")

    def scatter(self, blocks: Int32s, staged: Rows) -> None:
        self._move(staged, self._rows(blocks), "scatter")

    def copy_blocks(self, pairs: Int32s) -> None:
        self._move(self._rows(pairs[:, 0]), self._rows(pairs[:, 1]), "copy inside")
        self.copied = self._device.event_class()
        self.copied.record()

    def _move(self, source: Rows, target: Rows, name: str) -> None:
        speeds = self._device.speeds
        self._device.machine.spend(speeds.launch)
        taken: list[Any] = []
        self._device.issue(
            Operation(
                "compute",
                5e-6 + 2 * len(source) * self.bytes_per_block / speeds.memory,
                effect=lambda: target.put(taken),
                begin=lambda: taken.extend(source.cells[index] for index in source.at),
                reads=source.places(),
                writes=target.places(),
                share=0.99,
                name=name,
            )
        )


class StreamedRunner:
    """Computes nothing, for as long as the device would. The content of a block identifies its tokens."""

    num_refused = num_storage_errors = num_grammar_waits = 0

    def __init__(
        self,
        device: Device,
        times: StepTimes,
        *,
        num_blocks: int,
        block_size: int,
        bytes_per_block: int,
        num_host_blocks: int,
        max_model_len: int,
        budget: int,
    ) -> None:
        self.device, self.times = device, times
        self.pool = Pool(device, num_blocks, block_size, bytes_per_block)
        self.issuing = Issuing()
        memory = HostRows(device, num_host_blocks, bytes_per_block)
        self.host = HostTier(self.pool, memory, issuing=self.issuing)  # type: ignore[arg-type]
        self.copier = BlockCopier(DeviceTier(self.pool, BlockHashes(num_blocks, block_size)))  # type: ignore[arg-type]
        self.copier.tiers[HOST] = self.host
        self.info = Hello(
            1,
            0,
            executor_id="",
            model_fingerprint="streams",
            vocab_size=1 << 20,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            bytes_per_block=bytes_per_block,
            device="cuda",
            dtype="none",
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            tiers=(TierInfo(HOST, num_host_blocks),),
        )
        self.wrong: list[str] = []
        self._known: dict[int, Any] = {}
        self.reset(Welcome(1, 8, budget, keeps_blocks=True))

    def report_to(self, report: Any) -> None:
        self.copier.report_to(report)

    def reset(self, welcome: Welcome) -> None:
        info = self.info
        self.batch = InputBatch(
            num_rows=welcome.max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            pool_blocks=info.num_blocks,
            tiers={tier.number: tier.num_blocks for tier in info.tiers},
        )
        self.copier.reset(welcome.epoch, keep=welcome.keeps_blocks)

    def close(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> IssuedStep:
        """Issue a step, as ``ModelRunner`` does."""
        machine, times, issue = self.device.machine, self.times, self.device.issue
        began, done, began_at = self.device.event_class(), self.device.event_class(), machine.now
        began.record()
        with self.issuing.step():
            machine.spend(times.begin / 2)
            work = self.batch.apply(plan)
            self.copier.begin(plan.epoch, plan.step, work.copies)
            if work.num_tokens:
                machine.spend(times.begin / 2)
                for _ in range(times.uploads):
                    issue(Operation("in", self.device.speeds.copy_setup, name="upload"))
                issue(self._forward(work))
                machine.spend(times.issue - times.begin)
                # The last kernel of a step is issued last: the device cannot have finished before.
                issue(Operation("compute", 1e-6, name="end"))
                issue(Operation("out", self.device.speeds.copy_setup, name="tokens"))
            sampled = torch.zeros(len(work.sampled_rows), dtype=torch.int64)
            rows = [self.batch.sequences[row] for row in work.sampled_rows]
            self.batch.advance(work)
            done.record()
        return IssuedStep(plan, sampled, rows, None, [], machine.now - began_at, (began, done))

    def _names(self, tokens: Any) -> list[int]:
        """The contents of the full blocks of a sequence that begins with ``tokens``."""
        if (known := self._known.get(id(tokens))) is None or known[0] is not tokens:
            data, size, names = np.asarray(tokens, np.int32).tobytes(), 4 * self.info.block_size, [0]
            for start in range(0, len(data), size):
                names.append(zlib.crc32(data[start : start + size], names[-1]))
            self._known = {id(tokens): (tokens, known := (tokens, names[1:]))[1]}
        return known[1]

    def _forward(self, work: Any) -> Operation:
        size, times, batch = self.info.block_size, self.times, self.batch
        spans = [(row, int(batch.num_computed[row]), 1) for row in work.decoding.tolist()]
        spans += [(chunk.row, chunk.start, chunk.size) for chunk in work.chunks]
        seconds, reads, writes = times.step, set[int](), set[int]()
        content: dict[int, int] = {}
        expected: dict[int, int] = {}
        for row, start, count in spans:
            seconds += times.token * count + times.attention * count * (start + count / 2)
            table = batch.block_tables[row, : -(-(start + count) // size)].tolist()
            names = self._names(batch.sequences[row].tokens)
            for index, block in enumerate(table):
                if (index + 1) * size <= start:
                    reads.add(block)
                    expected[block] = names[index]
                else:
                    writes.add(block)
                    content[block] = names[index] if (index + 1) * size <= start + count else -1
        cells, wrong = self.pool.cells, self.wrong

        def check() -> None:
            wrong.extend(
                f"block {block} holds {cells[block]} instead of {name}"
                for block, name in expected.items()
                if cells[block] != name
            )

        def write() -> None:
            check()
            for block, name in content.items():
                cells[block] = name

        memory = id(cells)
        return Operation(
            "compute",
            seconds,
            begin=check,
            effect=write,
            reads=frozenset((memory, block) for block in reads),
            writes=frozenset((memory, block) for block in writes),
            name=f"step of {sum(count for _, _, count in spans)}",
        )
