"""Mixtures of experts on the CPU in float32, which ``pagewise_kernels.experts`` computes on a GPU."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from pagewise_kernels.cpu.library import empty, load_library, threads
from pagewise_kernels.cpu.operations import PackedWeight, check_input, check_norm, pack_panels

MAX_EXPERTS = 4096


class Choice(NamedTuple):
    """How a router chooses ``top_k`` of its experts, and the weights of their outputs.

    Scores are the softmax of the logits, or with a ``correction`` the sigmoid of each. The weight of a chosen expert is
    its score, with ``normalise`` over the sum of the chosen scores, times ``scale``. The ``correction`` [experts] is
    added to the scores for the choice alone. The choice is among the ``top_groups`` best of ``groups`` groups of
    experts, where a group is as good as the sum of its two best scores.
    """

    top_k: int
    normalise: bool = True
    scale: float = 1.0
    correction: torch.Tensor | None = None
    groups: int = 1
    top_groups: int = 1

    def fits(self, experts: int) -> bool:
        """Return whether a router of so many experts can choose so."""
        size, rest = divmod(experts, self.groups)
        corrected = self.correction is not None
        return (
            experts <= MAX_EXPERTS
            and rest == 0
            and 1 <= self.top_groups <= self.groups
            and 1 <= self.top_k <= self.top_groups * size
            and (self.groups == 1 or (corrected and size > 1))
            and (self.correction is None or self.correction.shape == (experts,))
        )


class Router:
    """Chooses experts by logits of ``weight`` [experts, hidden] and ``bias`` [experts].

    Raises:
        TypeError: the weight is not float32 on the CPU. ValueError: the choice does not fit its experts.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, choice: Choice) -> None:
        if not choice.fits(len(weight)):
            raise ValueError(f"a router of {len(weight)} experts cannot choose by {choice}")
        self._library = load_library()
        self._weight = PackedWeight(weight, bias)
        self._correction = None if choice.correction is None else choice.correction.detach().float().contiguous()
        self.pointers = *self._weight.pointers, None if self._correction is None else self._correction.data_ptr()
        self.hidden, self.num_experts, self.top_k = self._weight.ins, self._weight.outs, choice.top_k
        self.settings = choice.top_k, choice.groups, choice.top_groups, choice.normalise, choice.scale

    @property
    def num_weights(self) -> int:
        """The number of weights of the logits."""
        return self.num_experts * self.hidden

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [tokens, experts], weights [tokens, k] and experts int64 [tokens, k] of x [tokens, hidden].

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        tokens = check_input(x, self.hidden)
        logits = empty((tokens, self.num_experts), x.dtype)
        weights = empty((tokens, self.top_k), x.dtype)
        chosen = empty((tokens, self.top_k), torch.int64)
        self._library.pagewise_route(
            x.data_ptr(), x.stride(0), *self.pointers, logits.data_ptr(), weights.data_ptr(), chosen.data_ptr(), tokens,
            self.hidden, self.num_experts, *self.settings, threads(),
        )  # fmt: skip
        return logits, weights, chosen


class Activation(NamedTuple):
    """The activation of gate and up in an expert: gate · sigmoid(alpha · gate) · (up + shift), where neither is beyond
    ``limit``: gate is at most this, and up between it and its negative."""

    alpha: float
    shift: float
    limit: float

    def of(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the activations [.., inner] of gate and up [.., 2 · inner], by PyTorch."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)


SILU = Activation(1.0, 0.0, math.inf)
"""silu(gate) · up."""


class Experts(ABC):
    """Experts of float32 inputs and outputs, whose weights derived classes hold."""

    num_experts: int
    hidden: int
    inner: int

    @property
    def num_weights(self) -> int:
        """The number of weights of all experts."""
        return 3 * self.num_experts * self.hidden * self.inner

    def sums(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the experts of each token, x [tokens, hidden].

        ``chosen`` int64 [tokens, k]: the experts. ``weights`` [tokens, k]: of their outputs.

        Raises:
            ValueError: shapes do not fit, or there is no such expert. TypeError: x is not float32 on the CPU.
        """
        tokens = check_input(x, self.hidden)
        if chosen.dim() != 2 or len(chosen) != tokens or weights.shape != chosen.shape:
            raise ValueError(
                f"the experts and weights of {tokens} tokens are [tokens, k], not {list(chosen.shape)} and "
                f"{list(weights.shape)}"
            )
        sums = self._sums(x, chosen, weights)
        if sums is None:
            raise ValueError(f"tokens chose experts that are not among the {self.num_experts}")
        return sums

    @abstractmethod
    def _sums(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """Return the sums, or None if there is no such expert."""


class SortedExperts(Experts):
    """Experts of an operation that computes pairs of a token and an expert in the order of experts."""

    @abstractmethod
    def _compute(
        self,
        rows: torch.Tensor,
        activated: torch.Tensor,
        outs: torch.Tensor,
        active: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Write the outputs ``outs`` [pairs, hidden] of ``rows`` [pairs, hidden].

        ``activated`` [pairs, inner]: scratch memory. ``active``: the experts that have pairs. ``starts``: the first
        pair of each of them, and the number of pairs.
        """

    def _sums(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        flat = chosen.flatten()
        counts = flat.clamp(-1).add(1).bincount(minlength=self.num_experts + 1)
        if len(counts) > self.num_experts + 1 or counts[0]:
            return None
        order, active = flat.argsort(stable=True), counts[1:].nonzero()[:, 0]
        starts = counts[1:][active].cumsum(0)
        activated, outs = (empty((len(order), size), x.dtype) for size in (self.inner, self.hidden))
        rows = x[order // chosen.shape[1]]
        self._compute(rows, activated, outs, active, torch.cat([starts.new_zeros(1), starts]))
        of_tokens = outs[order.argsort()].view(*weights.shape, self.hidden)
        return (of_tokens * weights.to(outs.dtype)[..., None]).sum(dim=1)


class PackedExperts(Experts):
    """The weights of gate and up [experts, 2 · inner, hidden] and of down [experts, hidden, inner] in panels.

    ``gate_up_bias`` [experts, 2 · inner], ``down_bias`` [experts, hidden]: both, or neither.

    Raises:
        TypeError: the weights are not float32 on the CPU. ValueError: their shapes do not fit.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None, activation: Activation = SILU,
    ) -> None:  # fmt: skip
        if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
            raise ValueError(
                "experts have gate and up [experts, 2 * inner, hidden] and down [experts, hidden, inner], not "
                f"{list(gate_up.shape)} and {list(down.shape)}"
            )
        self._library = load_library()
        self.num_experts, self.hidden, self.inner = down.shape
        self.gate_up, self.down = pack_panels(gate_up, parts=2), pack_panels(down)
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None
        if gate_up_bias is not None and down_bias is not None:
            if gate_up_bias.shape != gate_up.shape[:2] or down_bias.shape != down.shape[:2]:
                raise ValueError(f"biases of the experts cannot be {list(gate_up_bias.shape)}, {list(down_bias.shape)}")
            in_panels = pack_panels(gate_up_bias.float()[..., None], parts=2)
            self._biases = in_panels, down_bias.detach().float().contiguous()
        gate_up_at, down_at = (bias.data_ptr() for bias in self._biases) if self._biases else (None, None)
        self.pointers = self.gate_up.data_ptr(), gate_up_at, self.down.data_ptr(), down_at, *activation

    def scratch(self, pairs: int) -> int:
        """Return the size of the scratch memory of the C function in float32, for so many pairs of token and expert."""
        return 2 * (2 * self.num_experts + 1 + pairs) + pairs * (self.hidden + self.inner)

    def _sums(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        tokens, top_k = chosen.shape
        pairs = chosen.numel()
        chosen, weights = chosen.long().contiguous(), weights.float().contiguous()
        out = empty((tokens, self.hidden), x.dtype)
        scratch = empty((self.scratch(pairs),), x.dtype)
        failed = self._library.pagewise_experts(
            x.data_ptr(), x.stride(0), *self.pointers, chosen.data_ptr(), weights.data_ptr(), scratch.data_ptr(),
            out.data_ptr(), tokens, top_k, self.num_experts, self.hidden, self.inner, threads(),
        )  # fmt: skip
        return None if failed else out


class Mixture:
    """A router and its experts, behind a norm.

    Raises:
        ValueError: they do not fit.
    """

    def __init__(self, router: Router, experts: PackedExperts) -> None:
        shape, expected = (experts.num_experts, experts.hidden), (router.num_experts, router.hidden)
        if shape != expected:
            raise ValueError(f"a router of [experts, hidden] {list(expected)} cannot have experts of {list(shape)}")
        self._library, self._router, self._experts = load_library(), router, experts
        self._settings = *router.settings, experts.num_experts, experts.hidden, experts.inner

    def sums(
        self, x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [tokens, hidden] for x [tokens, hidden], or with ``norm`` for ``operations.rms_norm`` of
        x, this weight, ``eps`` and the ``residual``, which that changes.

        Raises:
            ValueError: shapes do not fit. TypeError: x is not float32 on the CPU.
        """
        experts, top_k = self._experts, self._router.top_k
        tokens = check_input(x, experts.hidden)
        if norm is not None:
            check_norm(x, norm, residual)
        pairs = tokens * top_k
        scratch = empty(
            (2 * pairs + experts.scratch(pairs) + tokens * (experts.hidden + experts.num_experts) + pairs,), x.dtype
        )
        out = empty((tokens, experts.hidden), x.dtype)
        self._library.pagewise_mixture(
            x.data_ptr(), x.stride(0), None if residual is None else residual.data_ptr(),
            None if norm is None else norm.data_ptr(), eps, *self._router.pointers, *experts.pointers,
            scratch.data_ptr(), out.data_ptr(), tokens, *self._settings, threads(),
        )  # fmt: skip
        return out
