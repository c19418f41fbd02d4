"""The runner of rank 0 of an executor of several ranks: does its own part, and has the others do theirs."""

import dataclasses

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import AdapterLoaded, CompileGrammar, Copied, Found, Inventory, StepPlan, Welcome

from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.model_runner import IssuedStep, ModelRunner
from pagewise_executor.ranks.agreement import Agreement, common_device
from pagewise_executor.ranks.leader import Leader
from pagewise_executor.runner import BesideSteps, Counted, Report


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
            self._leader.send(welcome)
        super().reset(welcome)
        if self._leads:
            self._leader.await_reset(welcome.epoch)

    def report_to(self, report: Report) -> None:
        """See ``Runner``."""
        agreement: Agreement = self._leader.agree(report)

        def add(message: object) -> None:
            if isinstance(message, Copied | Found | AdapterLoaded):
                agreement.add(self._leader.rank, message)
            else:
                report(message)  # type: ignore[arg-type] # of rank 0 alone: grammars

        super().report_to(add)

    def handle(self, message: BesideSteps) -> None:
        """See ``Runner``. Rank 0 alone has grammars."""
        if not isinstance(message, CompileGrammar):
            self._leader.send(message)
        super().handle(message)

    def inventory(self) -> Inventory | None:
        """See ``Runner``."""
        return self._leader.common_blocks(super().inventory)

    @property
    def counted(self) -> Counted:
        """See ``Runner``; of all ranks together."""
        each = [super().counted, *(follower.counted for follower in self._leader.followers)]
        return Counted(*map(sum, zip(*map(msgspec.structs.astuple, each), strict=True)))

    def close(self) -> None:
        """See ``ModelRunner``; the other ranks end too."""
        self._leader.stop()  # all leave each other at the same time
        super().close()
        self._leader.wait()
