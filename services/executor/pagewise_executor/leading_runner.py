"""The runner of rank 0 of an executor of several ranks: does its own part, and passes its calls to the others."""

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    AdapterLoaded,
    CompileGrammar,
    Copied,
    Found,
    Inventory,
    StepPlan,
    StoredDropped,
    Welcome,
)

from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.issued_step import IssuedStep
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.ranks.agreement import Agreement, common_device
from pagewise_executor.ranks.leader import Leader
from pagewise_executor.ranks.messages import Offered
from pagewise_executor.runner import BesideSteps, Counted, Report


class LeadingRunner(ModelRunner):
    """A ``ModelRunner``, with its arguments, whose calls the other ranks get too."""

    def __init__(self, leader: Leader, config: ExecutorConfig, **arguments: object) -> None:
        self._leader = leader
        self._leads = self._sent = False
        super().__init__(config, **arguments)  # type: ignore[arg-type]
        endpoints = [self.info.block_endpoint, *(other.block_endpoint for other in self._others)]
        self.info = msgspec.structs.replace(
            self.info,
            block_endpoint=" ".join(endpoints) if all(endpoints) else "",
            bytes_per_block=leader.size * self.info.bytes_per_block,
            page_bytes=leader.size * self.info.page_bytes,
            device=self._devices,
        )

    def _rehearse(self, config: SizedConfig, dtype: torch.dtype) -> None:
        # From here on the other ranks follow: so far all have made the same calls by themselves.
        self._others = self._leader.ready()
        self._devices = common_device(self.info, self._others)
        self._leads = True
        super()._rehearse(config, dtype)

    def execute(self, plan: StepPlan) -> IssuedStep:
        """Issue a step on all ranks."""
        self._sent = False
        try:
            return super().execute(plan)
        except Exception as error:
            # An error before the plan was sent to the others, such as an invalid plan, is the step's own error. Later
            # they may be waiting for this rank in the middle of a layer.
            if self._sent:
                self._leader.give_up(f"rank 0 failed in step {plan.step}: {error}")
            raise

    def _accepted(self, plan: StepPlan) -> None:
        if self._leads:
            self._sent = True
            self._leader.begin_step(plan)

    def reset(self, welcome: Welcome) -> None:
        """Empty the input batches of all ranks."""
        if self._leads:
            self._leader.send(welcome)
        super().reset(welcome)
        if self._leads:
            self._leader.await_reset(welcome.epoch)

    def report_to(self, report: Report) -> None:
        """Call ``report`` with the outcomes on which the ranks agree, on any thread."""
        agreement: Agreement = self._leader.agree(report)

        def add(message: object) -> None:
            if isinstance(message, Copied | Found | StoredDropped | AdapterLoaded):
                agreement.add(self._leader.rank, message)
            else:
                report(message)  # type: ignore[arg-type] # of rank 0 alone: grammars

        super().report_to(add)

    def handle(self, message: BesideSteps) -> None:
        """Begin to handle a message on all ranks; called from any thread."""
        if not isinstance(message, CompileGrammar):  # rank 0 alone has grammars
            self._leader.send(message)
        super().handle(message)

    def inventory(self) -> Inventory | None:
        """Return the hashed blocks that are in the tiers of all ranks."""
        common = self._leader.common_blocks(super().inventory, renumber=self._kept is not None)
        if self._kept is not None:
            self._leader.send(Offered(common))
            self.agree(common)
        return common

    @property
    def counted(self) -> Counted:
        """The totals of the counters of all ranks."""
        each = [super().counted, *(follower.counted for follower in self._leader.followers)]
        return Counted(*map(sum, zip(*map(msgspec.structs.astuple, each), strict=True)))

    def close(self) -> None:
        """Release the resources of all ranks, and end the others."""
        self._leader.stop()  # all ranks leave the process group at the same time
        super().close()
        self._leader.wait()
