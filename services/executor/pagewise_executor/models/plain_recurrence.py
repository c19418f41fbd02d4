"""The forms of recurrent modules that the Triton kernels compute, by PyTorch, token by token in float32."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pagewise_kernels.cpu.recurrent import Places, Weights

from pagewise_executor.models.recurrent import CONV, RECURRENT, StateKey

States = Mapping[StateKey, torch.Tensor]
"""The states of some sequences, [sequences, *shape], which are updated in place."""


class PlainRecurrence:
    """Computes a gated delta net, KDA or Mamba-2 between its projections; or a short convolution: ``state`` is None.

    ``state``: the shape of the recurrent state. ``kept``: inputs of each channel in the conv state.

    Raises:
        ValueError: the Triton kernels do not compute this form.
    """

    def __init__(self, weights: Weights, places: Places, state: tuple[int, ...] | None, kept: int) -> None:
        self.weights, self.places, self.state, self.kept = weights, places, state, kept
        if state is None:
            fits = weights.gate == "alone" and not weights.conv_silu and places.times is not None
        else:
            delta = weights.skip is None
            self._heads, self._key, self._value = state if delta else (state[0], state[2], state[1])
            self._groups, rest = divmod(len(weights.conv) - self._heads * self._value, 2 * self._key)
            fits = weights.gate != "alone" and weights.conv_silu and places.times is None and not rest
            fits = fits and self._groups > 0 and self._heads % self._groups == 0 and delta == (places.beta is not None)
            # KDA has a decay of each key.
            decays = (self._heads, self._heads * self._key) if delta else (self._heads,)
            fits = fits and places.decay is not None and places.decay.numel() in decays
        if not fits:
            raise ValueError(f"{weights} and {places} do not fit a state {state}")

    def compute(self, projected: torch.Tensor, states: States, *, begun: bool) -> torch.Tensor:
        """Return outputs [sequences, tokens, inner] for ``projected`` [sequences, tokens, size].

        ``begun``: the states are of earlier tokens; else the sequences begin, and the states have no meaning yet.
        """
        weights, places, rows = self.weights, self.places, projected.float()
        inputs = rows[..., places.conv]
        if places.times is not None:
            inputs = inputs * rows[..., places.times]
        mixed = _convolved(inputs, weights.conv, weights.conv_bias, states[CONV, 0], begun=begun)
        if self.state is None:
            return mixed * rows[..., places.gate]
        return self._recur(rows, F.silu(mixed), states[RECURRENT, 0], begun=begun)

    def _recur(self, rows: torch.Tensor, mixed: torch.Tensor, held: torch.Tensor, *, begun: bool) -> torch.Tensor:
        weights, (count, tokens, _) = self.weights, rows.shape
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        state = held.float().clone() if begun else torch.zeros_like(held, dtype=torch.float32)
        results = rows.new_empty(count, tokens, self._heads, self._value)
        for token in range(tokens):
            dt = F.softplus(rows[:, token, self.places.decay] + weights.dt_bias)
            dt = dt if begun and tokens == 1 else dt.clamp(*weights.dt_limits)
            by_key = dt.view(count, self._heads, -1, 1)
            decay = torch.exp(-weights.a_log.exp()[:, None, None] * by_key)
            if weights.skip is None:
                state, results[:, token] = self._delta(rows[:, token], mixed[:, token], state * decay)
            else:
                x, k, q = self._parts(mixed[:, token], value_first=True)
                state = decay * state + (dt[..., None] * x)[..., None] * k[:, :, None]
                results[:, token] = (state * q[:, :, None]).sum(3) + weights.skip[:, None] * x
        held.copy_(state)
        gate = rows[..., self.places.gate]
        return self._gated(results.flatten(2), F.silu(gate) if weights.gate == "silu" else gate.sigmoid())

    def _delta(self, row: torch.Tensor, mixed: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.places.beta is not None
        q, k, v = self._parts(mixed, value_first=False)
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        beta = self.weights.beta_scale * row[:, self.places.beta].sigmoid()
        delta = beta[..., None] * (v - (state * k[..., None]).sum(2))
        state = state + k[..., None] * delta[:, :, None]
        return state, (state * q[..., None]).sum(2) / self._key**0.5

    def _parts(self, mixed: torch.Tensor, *, value_first: bool) -> list[torch.Tensor]:
        """Split convolved channels [sequences, channels] into keys, queries and values [sequences, heads, size]."""
        keys, values = self._groups * self._key, self._heads * self._value
        found: list[torch.Tensor] = []
        for part in torch.split(mixed, [values, keys, keys] if value_first else [keys, keys, values], dim=1):
            is_value = len(found) == (0 if value_first else 2)
            shaped = part.reshape(len(part), -1, self._value if is_value else self._key)
            found.append(shaped if is_value else shaped.repeat_interleave(self._heads // self._groups, 1))
        return found

    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        if weights.gate_first or weights.norm is None:
            x = x * gate
        if weights.norm is not None:
            parts = x.reshape(*x.shape[:2], -1, weights.norm_size)
            parts = parts * (parts.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
            x = parts.flatten(2) * weights.norm
            x = x if weights.gate_first else x * gate
        return x


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, held: torch.Tensor, *, begun: bool
) -> torch.Tensor:
    """Return the convolutions of channels [sequences, tokens, channels], and keep their last inputs in ``held``
    [sequences, channels, kept]."""
    known = held.float() if begun else torch.zeros_like(held, dtype=torch.float32)
    all_inputs = torch.cat([known, inputs.transpose(1, 2)], dim=2)
    held.copy_(all_inputs[..., -held.shape[2] :])
    needed = all_inputs[..., -(inputs.shape[1] + weight.shape[1] - 1) :]
    return F.conv1d(needed, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
