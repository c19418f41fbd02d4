"""RMSNorm and SiLU·mul on the CPU, which ``pagewise_kernels`` computes on a GPU, and linear layers in float32."""

import torch

from pagewise_kernels.cpu import huge_pages
from pagewise_kernels.cpu.library import WeightArguments, empty, load_library, threads

TYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return weight · x / sqrt(mean(x²) + eps) for x [rows, size] and weight [size], both float32 or bfloat16.

    With ``residual`` [rows, size], contiguous, x is added to it in place first, and its sum is normalised.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: types do not.
    """
    check_norm(x, weight, residual)
    rows, size = x.shape
    out = empty((rows, size), x.dtype)
    load_library().pagewise_rms_norm(
        x.data_ptr(), x.stride(0), residual.data_ptr() if residual is not None else None, weight.data_ptr(),
        out.data_ptr(), rows, size, eps, x.dtype == torch.bfloat16, threads(),
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up [rows, size] for gate_up [rows, 2 · size], gate first, float32 or bfloat16.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: types do not.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"silu_mul takes contiguous rows [rows, 2 * size], not {list(gate_up.shape)}")
    _check_types(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty((rows, size), gate_up.dtype)
    load_library().pagewise_silu_mul(
        gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, size, gate_up.dtype == torch.bfloat16,
        threads(),
    )  # fmt: skip
    return out


def pack_panels(weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Return weights float32 in panels: see ``in_panels``.

    Raises:
        TypeError: the weights are not float32 on the CPU.
    """
    if weight.dim() < 2 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise TypeError(f"weights are float32 [outs, ins] on the CPU, not {weight.dtype} {list(weight.shape)}")
    return in_panels(weight.detach(), parts)


def in_panels(values: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Return values [.., outs, ins] as [.., panels, ins, panel], with zeros behind the last output.

    A panel has as many outputs as the registers of this processor hold at once. Of several equal ``parts`` of the
    outputs, a panel has as many outputs of each.
    """
    size = load_library().pagewise_panel() // parts
    *others, outs, ins = values.shape
    whole, rest = divmod(outs // parts, size)
    packed = huge_pages.zeros((*others, whole + (rest > 0), ins, parts, size), values.dtype)
    divided = values.view(*others, parts, outs // parts, ins)
    full = divided[..., : whole * size, :].unflatten(-2, (whole, size))
    packed[..., :whole, :, :, :] = full.movedim((-4, -3, -2, -1), (-2, -4, -1, -3))
    packed[..., whole:, :, :, :rest] = divided[..., None, :, whole * size :, :].movedim(-1, -3)
    return packed.flatten(-2)


class PackedWeight:
    """The weight [outs, ins] and the bias [outs] of a linear layer, in the layout that the product reads.

    ``packed`` [panels, ins, panel]: see ``pack_panels``.

    Raises:
        TypeError: the weight is not float32 on the CPU.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._library = load_library()
        self.packed = pack_panels(weight)
        self.outs, self.ins = weight.shape
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.pointers = self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    @property
    def arguments(self) -> WeightArguments:
        """This weight as an argument of ``pagewise_kernels.cpu.layer``."""
        return WeightArguments(WeightArguments.FLOAT32, self.ins, self.outs, self.pointers)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, ins] to [rows, outs].

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        rows = check_input(x, self.ins)
        out = empty((rows, self.outs), x.dtype)
        packed, bias = self.pointers
        self._library.pagewise_linear(
            x.data_ptr(), x.stride(0), packed, bias, out.data_ptr(), rows, self.ins, self.outs, threads(),
        )  # fmt: skip
        return out


def check_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Check the arguments of ``rms_norm``.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: types do not.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"rms_norm takes rows [rows, size] and a weight [size], not {list(x.shape)}")
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"the residual is contiguous {list(x.shape)} like x, not {list(residual.shape)}")
    _check_types(x, weight, x if residual is None else residual)


def check_input(x: torch.Tensor, ins: int) -> int:
    """Return the number of rows of the input of a linear layer, x float32 [rows, ins].

    Raises:
        ValueError: shape or strides do not fit. TypeError: it is not float32 on the CPU.
    """
    if x.dim() != 2 or x.shape[1] != ins or x.stride(1) != 1:
        raise ValueError(f"the product takes contiguous rows of {ins}, not {list(x.shape)}")
    if x.dtype != torch.float32 or not x.is_cpu:
        raise TypeError(f"the product takes float32 on the CPU, not {x.dtype} on {x.device}")
    return x.shape[0]


def _check_types(x: torch.Tensor, *others: torch.Tensor) -> None:
    dtypes = [tensor.dtype for tensor in (x, *others)]
    if x.dtype not in TYPES or not x.is_cpu or dtypes.count(x.dtype) < len(dtypes):
        given = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (x, *others))
        raise TypeError(f"the CPU operations take tensors of one type, float32 or bfloat16, on the CPU, not {given}")
