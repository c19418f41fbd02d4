"""One token of recurrent layers on the CPU in float32: gated delta nets and Mamba-2, between their projections."""

import ctypes
from dataclasses import dataclass

import torch

from pagewise_kernels.cpu.library import RecurrenceArguments, empty, load_library, parallel_regions, threads

MAX_STATE = 1 << 16
"""Most values of the state of a head: a thread has room for one of them."""
MAX_WIDTH = 64
"""Most tokens of a convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the inputs of a layer are in a row of its projections, as indices.

    ``conv`` [channels]: of the convolution. ``gate`` [heads · value]. ``decay`` [heads], ``beta`` [heads]: before they
    are mapped to (0, 1). Mamba-2 has no beta.
    """

    conv: torch.Tensor
    gate: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a layer between its projections.

    ``conv`` [channels, width], ``conv_bias`` [channels]: of the convolution of each channel, with SiLU behind it.
    ``a_log``, ``dt_bias`` [heads]: the decay is exp(-exp(a_log) · dt), where dt is softplus(input + dt_bias). ``skip``
    [heads]: of Mamba-2, whose output has the value times it; None: the layer is a gated delta net. ``norm`` [heads ·
    value]: of the RMS norm of outputs, over ``norm_size`` each; None: there is a gate alone. ``gate_first``: outputs
    are multiplied by silu(gate) before the norm, not behind it. ``beta_scale``: of beta.
    """

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    norm_size: int = 1
    eps: float = 1e-6
    gate_first: bool = False
    beta_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the states of sequences are: ``memory`` uint8 [pages, page bytes], and the pages of the blocks that are
    read and written, int32 [sequences, pages per block]. A block may be both.

    ``conv_start``, ``state_start``: the first byte of each state in a block.
    """

    memory: torch.Tensor
    read: torch.Tensor
    written: torch.Tensor
    conv_start: int
    state_start: int


class RecurrentStep:
    """Computes one token of each sequence. ``kept``: how many inputs of each channel the conv state has.

    ``state``: the shape of the recurrent state, of a gated delta net [heads, key, value], whose channels are queries
    and keys [groups, key] and values [heads, value]; of Mamba-2 [heads, value, key], whose channels are values [heads,
    value], keys and queries [groups, key]. A group of heads shares keys and queries.

    Raises:
        ValueError: shapes do not fit. TypeError: weights are not on the CPU.
    """

    def __init__(self, weights: Weights, places: Places, state: tuple[int, int, int], kept: int) -> None:
        self._library = load_library()
        delta = weights.skip is None
        heads, key, value = state if delta else (state[0], state[2], state[1])
        channels, width = weights.conv.shape
        groups, rest = divmod(channels - heads * value, 2 * key)
        sizes = [(weights.a_log, heads), (weights.dt_bias, heads), (places.gate, heads * value), (places.decay, heads)]
        optional = [(weights.conv_bias, channels), (weights.skip, heads), (weights.norm, heads * value)]
        sizes += [(places.conv, channels), *((one, size) for one, size in optional if one is not None)]
        sizes += [(places.beta, heads)] if delta and places.beta is not None else []
        if (
            rest or groups < 1 or heads % groups or key * value > MAX_STATE or not width - 1 <= kept <= MAX_WIDTH
            or not kept or delta != (places.beta is not None) or heads * value % weights.norm_size
            or any(one.shape != (size,) for one, size in sizes)
        ):  # fmt: skip
            raise ValueError(f"{weights} and {places} do not fit a state {state} and {kept} inputs of convolutions")
        if any(one.device.type != "cpu" for one, _ in sizes):
            raise TypeError("the weights of recurrent layers are on the CPU")
        floats = [
            None if one is None else one.detach().float().contiguous()
            for one in (weights.conv, weights.conv_bias, -weights.a_log.detach().float().exp(), weights.dt_bias,
                        weights.skip, weights.norm)
        ]  # fmt: skip
        order = (places.conv, places.gate, places.decay, places.beta)
        indices = [None if one is None else one.int().contiguous() for one in order]
        self._least = 1 + max(int(one.max()) for one in indices if one is not None)
        if min(int(one.min()) for one in indices if one is not None) < 0:
            raise ValueError("places in a row of projections are not negative")
        self._kept = floats, indices  # while the structure points to them
        at = [None if one is None else one.data_ptr() for one in (*indices, *floats)]
        self._arguments = RecurrenceArguments(
            None, *at, channels=channels, width=width, kept=kept, heads=heads,
            key_heads=groups, key=key, value=value, norm_size=weights.norm_size, gate_first=weights.gate_first,
            beta_scale=weights.beta_scale, eps=weights.eps,
        )  # fmt: skip
        self._at = ctypes.byref(self._arguments)
        self._conv_bytes, self._state_bytes = 4 * channels * kept, 4 * heads * key * value

    def outputs(self, projected: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Return outputs [sequences, heads · value] for ``projected`` float32 [sequences, size]; update the states.

        Two sequences write different blocks, and a block that one of them writes is read by no other one.

        Raises:
            ValueError: shapes do not fit, or there is no such page. TypeError: types do not fit.
        """
        a, memory, (count, size) = self._arguments, blocks.memory, projected.shape
        pages = blocks.read.shape
        if (
            size < self._least or projected.stride(1) != 1 or not memory.is_contiguous() or memory.dim() != 2
            or len(pages) != 2 or pages[0] != count or blocks.written.shape != pages
            or not (blocks.read.is_contiguous() and blocks.written.is_contiguous())
            or min(blocks.conv_start, blocks.state_start) < 0
            or max(blocks.conv_start + self._conv_bytes, blocks.state_start + self._state_bytes)
            > pages[1] * memory.shape[1]
        ):  # fmt: skip
            raise ValueError(
                f"{count} rows of {size} do not fit the blocks {list(pages)} of pages {list(memory.shape)}"
            )
        types = projected.dtype, memory.dtype, blocks.read.dtype, blocks.written.dtype
        if types != (torch.float32, torch.uint8, torch.int32, torch.int32) or not (projected.is_cpu and memory.is_cpu):
            raise TypeError(f"recurrent layers take float32, pages of uint8, and int32 on the CPU, not {types}")
        out = empty((count, a.heads * a.value), projected.dtype)
        convolved = empty((count, a.channels), projected.dtype)
        a.projected, a.row_stride, a.sequences = projected.data_ptr(), projected.stride(0), count
        a.memory, a.read, a.written = memory.data_ptr(), blocks.read.data_ptr(), blocks.written.data_ptr()
        (a.num_pages, a.page_bytes), a.pages_per_block = memory.shape, pages[1]
        a.conv_start, a.state_start = blocks.conv_start, blocks.state_start
        a.convolved, a.out, a.threads, a.parallel = convolved.data_ptr(), out.data_ptr(), threads(), parallel_regions()
        if self._library.pagewise_recur(self._at):
            raise ValueError(f"blocks have pages that are not among the {len(memory)}")
        return out
