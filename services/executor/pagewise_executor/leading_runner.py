"""The runner of rank 0 of an executor of several ranks: does its own part, and has the others do theirs."""

import dataclasses

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    AdapterLoaded,
    CancelCopies,
    Copied,
    Found,
    Inventory,
    LoadAdapter,
    LookUp,
    StepPlan,
    Welcome,
)

from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.issued_step import IssuedStep
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.ranks.agreement import Agreement, common_device
from pagewise_executor.ranks.leader import Leader
from pagewise_executor.runner import Report


class LeadingRunner(ModelRunner):
    """A ``ModelRunner`` whose calls the other ranks get too. Its arguments are those of ``ModelRunner``."""

    def __init__(self, leader: Leader, config: ExecutorConfig, **arguments: object) -> None:
        self._leader = leader
        self._leads = self._told = False
        super().__init__(config, **arguments)  # type: ignore[arg-type]
        endpoints = [self.info.block_endpoint, *(other.block_endpoint for other in self._others)]
        self.info = dataclasses.replace(
            self.info,
            block_endpoint=" ".join(endpoints) if all(endpoints) else "",
            bytes_per_block=leader.size * self.info.bytes_per_block,
            device=self._devices,
        )

    def _rehearse(self, config: SizedConfig, dtype: torch.dtype) -> None:
        """See ``ModelRunner``. From here on the others follow: so far all have done the same by themselves."""
        self._others = self._leader.ready()
        self._devices = common_device(self.info, self._others)
        self._leads = True
        super()._rehearse(config, dtype)

    def execute(self, plan: StepPlan) -> IssuedStep:
        """See ``Runner``."""
        self._told = False
        try:
            return super().execute(plan)
        except Exception as error:
            # What is raised before the others were told of the plan, such as that it is wrong, is the step's own error.
            # Later on they may be waiting for this rank in the middle of a layer.
            if self._told:
                self._leader.give_up(f"rank 0 failed in step {plan.step}: {error}")
            raise

    def _accepted(self, plan: StepPlan) -> None:
        if self._leads:
            self._told = True
            self._leader.begin_step(plan)

    def reset(self, welcome: Welcome) -> None:
        """See ``Runner``."""
        if self._leads:
            self._leader.tell(welcome)
        super().reset(welcome)
        if self._leads:
            self._leader.settle(welcome.epoch)

    def report_copies(self, report: Report) -> None:
        """See ``Runner``."""
        agreement: Agreement = self._leader.agree(report)

        def add(message: object) -> None:
            if isinstance(message, Copied | Found | AdapterLoaded):
                agreement.add(self._leader.rank, message)
            else:
                report(message)  # type: ignore[arg-type] # of rank 0 alone: grammars

        super().report_copies(add)

    def look_up(self, message: LookUp) -> None:
        """See ``Runner``."""
        self._leader.tell(message)
        super().look_up(message)

    def load_adapter(self, message: LoadAdapter) -> None:
        """See ``Runner``."""
        self._leader.tell(message)
        super().load_adapter(message)

    def cancel_copies(self, cancelled: CancelCopies) -> None:
        """See ``Runner``."""
        self._leader.tell(cancelled)
        super().cancel_copies(cancelled)

    def inventory(self) -> Inventory | None:
        """See ``Runner``."""
        return self._leader.common_blocks(super().inventory)

    @property
    def num_storage_errors(self) -> int:
        """See ``Runner``."""
        return super().num_storage_errors + sum(each.counted.num_storage_errors for each in self._leader.followers)

    @property
    def num_refused(self) -> int:
        """See ``Runner``."""
        return super().num_refused + sum(each.counted.num_refused for each in self._leader.followers)

    @property
    def num_closed(self) -> int:
        """See ``Runner``."""
        return super().num_closed + sum(each.counted.num_closed for each in self._leader.followers)

    def close(self) -> None:
        """See ``ModelRunner``; the other ranks end too."""
        self._leader.stop()  # all leave each other at the same time
        super().close()
        self._leader.wait()
