"""Random weights with scales in two steps, for tests of their products."""

from dataclasses import dataclass

import torch
from pagewise_kernels.cpu.linear_grouped import GroupedWeight


@dataclass
class Form:
    """A form of weights. ``span``: groups that share a scale, 0: there are no steps. ``leasts``: each group has one."""

    bits: int
    zero: int
    group: int
    span: int
    leasts: bool


FORMS = (
    Form(4, 0, 32, 8, True), Form(8, 0, 32, 8, True), Form(8, 32, 16, 16, False), Form(8, 128, 32, 0, False),
    Form(4, 0, 16, 0, True),
)  # fmt: skip


class Drawn:
    """The arguments of a random weight, and its weights in float64."""

    def __init__(self, form: Form, outs: int, spans: int) -> None:
        groups = spans * max(1, form.span)
        self.form, self.codes = form, torch.randint(1 << form.bits, (outs, groups * form.group), dtype=torch.uint8)
        self.scales = (torch.rand(outs, spans) / 20 + 1e-3).half()
        self.steps = torch.randint(-128, 128, (outs, groups), dtype=torch.int8) if form.span else None
        self.leasts = torch.randn(outs, spans).half() if form.leasts else None
        self.least_steps = torch.randint(64, (outs, groups), dtype=torch.int8) if form.leasts and form.span else None
        self.weights = (self.codes.double() - form.zero) * self._wide(self.scales, self.steps)
        if self.leasts is not None:
            self.weights -= self._wide(self.leasts, self.least_steps)

    def _wide(self, scales: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        wide = scales.double().repeat_interleave(max(1, self.form.span), dim=1)
        return (wide if steps is None else wide * steps).repeat_interleave(self.form.group, dim=1)

    def layer(self, bias: torch.Tensor | None = None) -> GroupedWeight:
        return GroupedWeight(
            self.codes, self.form.bits, self.form.zero, self.scales, self.steps, self.leasts, self.least_steps, bias
        )
