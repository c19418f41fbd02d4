"""Rounding to four bits by which errors of a row of weights cancel for given inputs (GPTQ; Frantar and others, 2022).

The weights of a row are rounded one after the other. The weights that are not yet rounded then change so that the
output changes least: by the inverse of the products of inputs, of which a factor of Cholesky has the part that is
needed.
"""

import torch

from pagewise_executor.models.four_bit_weight import GROUP, FourBitWeight, empty_weight, quantise_groups

_NEIGHBOURS = 4096
"""Inputs whose errors may cancel: factors of all inputs of large layers would take gigabytes, and minutes."""
_DAMPING = 0.01
"""Part of the mean square of inputs that is added to each square: so rounding does not rely on the text too much."""


def add_products(x: torch.Tensor, to: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return the sums over rows of the products of inputs x [rows, ins] with each other, as matrices [n, n] of n
    neighbours each. ``to``: sums so far, which change."""
    parts = torch.split(x.float(), _NEIGHBOURS, dim=1)
    if to is None:
        return [part.T @ part for part in parts]
    return [sums.addmm_(part.T, part) for sums, part in zip(to, parts, strict=True)]


def quantise_balanced(weight: torch.Tensor, products: list[torch.Tensor]) -> tuple[FourBitWeight, float]:
    """Quantise weights float32 [outs, ins] by the products of their inputs, of ``add_products``; also return the sum of
    the squares of their rounding errors.

    Raises:
        torch.linalg.LinAlgError: inputs were not finite.
    """
    made, error, start = empty_weight(*weight.shape), 0.0, 0
    assert made.zeros is not None
    for matrix in products:
        left = weight[:, start : start + len(matrix)].T.float().contiguous()
        factor = _factor(matrix)
        for first in range(0, len(matrix), GROUP):
            stop, group = min(first + GROUP, len(matrix)), (start + first) // GROUP
            own, rows = left[first:stop].clone(), factor[first:stop]
            _, scales, zeros, _ = quantise_groups(own.T)
            scales, zeros = scales[:, 0], zeros[:, 0].float()
            codes, errors = torch.empty_like(own), torch.empty_like(own)
            for at, row in enumerate(own):
                codes[at] = (row / scales).round_().add_(zeros).clamp_(0, 15)
                errors[at] = row.sub((codes[at] - zeros) * scales).div_(rows[at, first + at])
                own[at + 1 :].addmm_(rows[at, first + at + 1 : stop, None], errors[at : at + 1], alpha=-1)
            left[stop:].addmm_(rows[:, stop:].T, errors, alpha=-1)
            columns = slice(start + first, start + stop)
            made.codes[:, columns] = codes.T.byte()
            made.scales[:, group], made.zeros[:, group] = scales, zeros.byte()
            error += float(((codes - zeros) * scales).sub_(weight[:, columns].T).square_().sum())
        start += len(matrix)
    return made, error


def _factor(products: torch.Tensor) -> torch.Tensor:
    """Return the upper factor of Cholesky [n, n] of the inverse of the products of n inputs, in float32."""
    wide = products.double()
    squares = wide.diagonal()
    squares += _DAMPING * squares.mean().clamp(min=torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
