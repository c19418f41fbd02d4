"""Recurrent layers on the CPU, between their projections: gated delta nets, KDA, Mamba-2, and short convolutions."""

import ctypes
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from pagewise_kernels.cpu.library import RecurrenceArguments, empty, load_library, threads

MAX_STATE = 1 << 16
"""Most values of the state of a head: a thread has room for one of them."""
MAX_KEY = 1 << 11
"""Most values of a key: a thread has room for the keys of some tokens."""
MAX_WIDTH = 64
"""Most tokens of a convolution."""
Gate = Literal["alone", "silu", "sigmoid"]
GATES = get_args(Gate)
"""The factor of outputs: the gate itself, or a function of it. The order is the same as in recurrent.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the inputs of a layer are in a row of its projections, as indices.

    ``conv`` [channels]: of the convolution; ``times`` [channels]: their factors. ``gate`` [inner]. ``decay`` [heads],
    or [heads · key] if each key has one of its own, and ``beta`` [heads]: before they are mapped to (0, 1). Mamba-2 has
    no beta, and short convolutions have neither.
    """

    conv: torch.Tensor
    gate: torch.Tensor
    decay: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    times: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a layer between its projections.

    ``conv`` [channels, width], ``conv_bias`` [channels]: of the convolution of each channel; ``conv_silu``: with SiLU
    behind it. ``a_log`` [heads], ``dt_bias`` as ``Places.decay``: the decay is exp(-exp(a_log) · dt), where dt is
    softplus(input + dt_bias). ``skip`` [heads]: of Mamba-2, whose output has the value times it; None: the layer is a
    gated delta net. ``norm`` [inner]: of the RMS norm of outputs, over ``norm_size`` each; None: there is a gate alone.
    ``gate``: one of ``GATES``. ``gate_first``: outputs are multiplied by it before the norm, not behind it.
    ``beta_scale``: of beta. ``dt_limits``: the least and the largest dt of Mamba-2, which hold as in transformers: not
    for single tokens of sequences that have states.
    """

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    conv_silu: bool = True
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    norm_size: int = 1
    eps: float = 1e-6
    gate: Gate = "silu"
    gate_first: bool = False
    beta_scale: float = 1.0
    dt_limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the states of sequences are: ``memory`` uint8 [pages, page bytes], and the pages of the blocks that are
    read and written, int32 [sequences, pages per block]. A block may be both. ``read`` is None if the sequences begin,
    and ``written`` if nothing is written.

    ``conv_start``, ``state_start``: the first byte of each state in a block.
    """

    memory: torch.Tensor
    read: torch.Tensor | None
    written: torch.Tensor | None
    conv_start: int
    state_start: int = 0


class RecurrentStep:
    """Computes tokens of sequences. ``kept``: how many inputs of each channel the conv state has.

    ``state``: the shape of the recurrent state, which is in float32, of a gated delta net [heads, key, value], whose
    channels are queries and keys [groups, key] and values [heads, value]; of Mamba-2 [heads, value, key], whose
    channels are values [heads, value], keys and queries [groups, key]. A group of heads shares keys and queries. None:
    the layer is a short convolution.

    Raises:
        ValueError: shapes do not fit. TypeError: weights are not on the CPU.
    """

    def __init__(self, weights: Weights, places: Places, state: tuple[int, int, int] | None, kept: int) -> None:
        self._library = load_library()
        delta, (channels, width) = weights.skip is None, weights.conv.shape
        heads, key, value = (0, 0, 0) if state is None else state if delta else (state[0], state[2], state[1])
        inner = heads * value if state is not None else channels
        groups, rest = divmod(channels - inner, 2 * key) if key else (0, 0)
        by_key = key > 1 and places.decay is not None and places.decay.numel() == heads * key
        norm_size = inner if weights.norm is None else weights.norm_size
        decays = heads * key if by_key else heads
        sizes = [(places.conv, channels), (places.gate, inner)]
        recurrent = [(weights.a_log, heads), (weights.dt_bias, decays), (places.decay, decays)]
        recurrent += [(places.beta, heads)] if delta else [(weights.skip, heads)]
        optional = [(weights.conv_bias, channels), (weights.norm, inner), (places.times, channels)]
        optional += [] if state is not None else recurrent
        sizes += [(one, size) for one, size in optional if one is not None]
        needed = recurrent if state is not None else []
        if (
            rest or (state is not None and (groups < 1 or heads % groups)) or key * value > MAX_STATE or key > MAX_KEY
            or not width - 1 <= kept <= MAX_WIDTH or not kept or inner % norm_size or (by_key and not delta)
            or any(one is None for one, _ in needed) or (not delta and places.beta is not None)
            or any(one is not None and one.shape != (size,) for one, size in sizes + needed)
        ):  # fmt: skip
            raise ValueError(f"{weights} and {places} do not fit a state {state} and {kept} inputs of convolutions")
        if any(one is not None and one.device.type != "cpu" for one, _ in sizes + needed):
            raise TypeError("the weights of recurrent layers are on the CPU")
        rate = None if weights.a_log is None else -weights.a_log.detach().float().exp()
        floats = [
            None if one is None else one.detach().float().contiguous()
            for one in (weights.conv.T, weights.conv_bias, rate, weights.dt_bias, weights.skip, weights.norm)
        ]
        order = (places.conv, places.times, places.gate, places.decay, places.beta)
        indices = [None if one is None else one.int().contiguous() for one in order]
        self._least = 1 + max(int(one.max()) for one in indices if one is not None)
        if min(int(one.min()) for one in indices if one is not None) < 0:
            raise ValueError("places in a row of projections are not negative")
        self._kept = floats, indices  # while the structure points to them
        at = [None if one is None else one.data_ptr() for one in (*indices, *floats)]
        self._arguments = RecurrenceArguments(
            None, *at, channels=channels, width=width, kept=kept, conv_silu=weights.conv_silu, heads=heads,
            key_heads=groups, key=key, value=value, decay_by_key=by_key, inner=inner,
            values_from=2 * groups * key if delta else 0, norm_size=norm_size, gate=GATES.index(weights.gate),
            gate_first=weights.gate_first, beta_scale=weights.beta_scale, eps=weights.eps,
            dt_least=weights.dt_limits[0], dt_most=weights.dt_limits[1],
        )  # fmt: skip
        self._at = ctypes.byref(self._arguments)
        self._conv_values, self._state_bytes = channels * kept, 4 * heads * key * value

    def empty_outputs(self, projected: torch.Tensor) -> torch.Tensor:
        """Return memory for the outputs [rows, inner] of ``projected`` [rows, size]."""
        return empty((len(projected), self._arguments.inner), projected.dtype)

    def compute(
        self, projected: torch.Tensor, rows: torch.Tensor, blocks: Blocks, outputs: torch.Tensor
    ) -> torch.Tensor:
        """Compute tokens of sequences in order, update their states, and return ``outputs`` [all rows, inner].

        ``projected`` [all rows, size] in float32 or bfloat16, in which conv states and outputs are too. ``rows`` int64
        [sequences, tokens]: the rows of the tokens there and in ``outputs``; others are left alone.

        Two sequences write different blocks, and a block that one of them writes is read by no other one.

        Raises:
            ValueError: shapes do not fit, or there is no such page or row. TypeError: types do not fit.
        """
        a, memory, (count, size) = self._arguments, blocks.memory, projected.shape
        pages = [one for one in (blocks.read, blocks.written) if one is not None]
        per_block = pages[0].shape[-1] if pages else 0
        conv_bytes = projected.dtype.itemsize * self._conv_values
        if (
            size < self._least or projected.stride(1) != 1 or not memory.is_contiguous() or memory.dim() != 2
            or rows.dim() != 2 or any(one.shape != (len(rows), per_block) for one in pages)
            or not all(one.is_contiguous() for one in (rows, *pages))
            or outputs.shape != (count, a.inner) or not outputs.is_contiguous()
            or min(blocks.conv_start, blocks.state_start) < 0
            or (pages and per_block * memory.shape[1]
            < max(blocks.conv_start + conv_bytes, blocks.state_start + self._state_bytes))
        ):  # fmt: skip
            raise ValueError(
                f"{list(rows.shape)} tokens in {count} rows of {size} do not fit blocks "
                f"{[list(one.shape) for one in pages]} of pages {list(memory.shape)} and outputs {list(outputs.shape)}"
            )
        types = {memory.dtype: torch.uint8, rows.dtype: torch.int64} | {one.dtype: torch.int32 for one in pages}
        if (
            any(found != expected for found, expected in types.items()) or outputs.dtype != projected.dtype
            or projected.dtype not in (torch.float32, torch.bfloat16) or not (projected.is_cpu and memory.is_cpu)
        ):  # fmt: skip
            raise TypeError(
                "recurrent layers take float32 or bfloat16, pages of uint8, their indices as int32 and rows as int64, "
                f"on the CPU, not {projected.dtype}, {', '.join(map(str, types))}, and {outputs.dtype}"
            )
        convolved = empty((rows.numel(), a.channels), torch.float32)
        a.projected, a.row_stride, a.num_rows = projected.data_ptr(), projected.stride(0), count
        a.bf16, (a.sequences, a.tokens) = projected.dtype == torch.bfloat16, rows.shape
        a.memory, a.rows, (a.num_pages, a.page_bytes) = memory.data_ptr(), rows.data_ptr(), memory.shape
        a.read = None if blocks.read is None else blocks.read.data_ptr()
        a.written, a.pages_per_block = None if blocks.written is None else blocks.written.data_ptr(), per_block
        a.conv_start, a.state_start, a.convolved = blocks.conv_start, blocks.state_start, convolved.data_ptr()
        a.outputs, a.threads = outputs.data_ptr(), threads()
        if wrong := self._library.pagewise_recur(self._at):
            kind, most = (("pages", len(memory)), ("rows", count))[wrong - 1]
            raise ValueError(f"there are {kind} that are not among the {most}")
        return outputs
