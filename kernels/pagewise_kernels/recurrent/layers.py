"""The weights of recurrent layers on the device, and where their inputs are in a row of their projections."""

import torch

from pagewise_kernels.cpu.recurrent import Places, Weights

MAX_KEY, MAX_VALUE = 256, 1024
"""Sizes of the state of a head."""
MAX_WIDTH = 16
"""Most tokens of a convolution, and of a conv state."""


class ShortConvolution:
    """A convolution of products of two inputs, whose result is multiplied by a third one.

    ``conv`` [channels, width] and ``conv_bias`` [channels]: of the convolution. ``conv_from``, ``factor_from``,
    ``gate_from`` [channels]: the indices of the three inputs in a row of projections. ``kept``: inputs of each channel
    in the conv state.

    Raises:
        ValueError: shapes do not fit.
    """

    def __init__(
        self, conv: torch.Tensor, conv_bias: torch.Tensor | None, conv_from: torch.Tensor, factor_from: torch.Tensor,
        gate_from: torch.Tensor, kept: int,
    ) -> None:  # fmt: skip
        channels = conv.shape[0]
        _check_convolution(conv, kept)
        if any(one.shape != (channels,) for one in (conv_from, factor_from, gate_from)):
            raise ValueError(f"each of {channels} channels has three inputs")
        self.kept = kept
        self.conv, self.conv_bias = _floats(conv), _floats(conv_bias)
        self.conv_from, self.factor_from, self.gate_from = (
            one.to(conv.device, torch.int32).contiguous() for one in (conv_from, factor_from, gate_from)
        )
        self.size = 1 + max(int(one.max()) for one in (conv_from, factor_from, gate_from))


class Recurrence:
    """A gated delta net, KDA or Mamba-2 between its projections. ``by_key``: each key has a decay, as in KDA.

    ``weights`` and ``places``: as the CPU operations take them, here on the device of ``weights.conv``. ``state``: the
    shape of the recurrent state, of a gated delta net [heads, key, value], of Mamba-2 [heads, value, key]. ``kept``:
    inputs of each channel in the conv state.

    Raises:
        ValueError: shapes do not fit.
    """

    def __init__(self, weights: Weights, places: Places, state: tuple[int, int, int], kept: int) -> None:
        self.is_delta = weights.skip is None
        self.heads, self.key, self.value = state if self.is_delta else (state[0], state[2], state[1])
        channels = len(weights.conv)
        self.groups, rest = divmod(channels - self.heads * self.value, 2 * self.key)
        inner = self.heads * self.value
        of_keys = self.heads * self.key
        self.by_key = self.is_delta and places.decay is not None and places.decay.numel() == of_keys > self.heads
        decays = of_keys if self.by_key else self.heads
        sizes: list[tuple[torch.Tensor | None, int]] = [(weights.a_log, self.heads), (weights.dt_bias, decays)]
        sizes += [(places.conv, channels), (places.gate, inner), (places.decay, decays)]
        optional: list[tuple[torch.Tensor | None, int]] = [(weights.conv_bias, channels), (weights.norm, inner)]
        optional += [(weights.skip, self.heads), (places.beta, self.heads)]
        sizes += [(one, size) for one, size in optional if one is not None]
        _check_convolution(weights.conv, kept)
        if (
            rest or self.groups < 1 or self.heads % self.groups or self.is_delta != (places.beta is not None)
            or inner % weights.norm_size or any(one is None or one.shape != (size,) for one, size in sizes)
            or self.key > MAX_KEY or self.value > MAX_VALUE or not weights.conv_silu
            or weights.gate == "alone" or weights.a_log is None or places.decay is None
        ):  # fmt: skip
            raise ValueError(f"{weights} and {places} do not fit a state {state} and {kept} inputs of convolutions")
        device = weights.conv.device
        self.kept, self.limits = kept, weights.dt_limits
        self.conv, self.conv_bias = _floats(weights.conv), _floats(weights.conv_bias)
        self.rate, self.dt_bias = -weights.a_log.detach().float().exp(), _floats(weights.dt_bias)
        self.skip, self.norm = _floats(weights.skip), _floats(weights.norm)
        self.norm_size, self.eps = weights.norm_size, weights.eps
        self.gate, self.gate_first, self.beta_scale = weights.gate, weights.gate_first, weights.beta_scale
        beta = places.decay if places.beta is None else places.beta
        order = places.conv, places.gate, places.decay, beta
        self.conv_from, self.gate_from, self.decay_from, self.beta_from = (
            one.to(device, torch.int32).contiguous() for one in order
        )
        self.size = 1 + max(int(one.max()) for one in order)


def _check_convolution(conv: torch.Tensor, kept: int) -> None:
    if conv.dim() != 2 or not 1 <= max(conv.shape[1] - 1, 1) <= kept <= MAX_WIDTH:
        raise ValueError(f"a convolution {list(conv.shape)} does not fit a state of {kept} inputs")


def _floats(tensor: torch.Tensor | None) -> torch.Tensor:
    return tensor if tensor is None else tensor.detach().float().contiguous()  # type: ignore[return-value]
