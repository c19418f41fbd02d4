"""Philox 4x32-10, a counter-based random generator, in torch integer arithmetic.

The same key and counter give the same bits on every device, in any batch. Source: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(key: torch.Tensor, counter: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return four words of random bits per counter.

    ``key``: int64 [..., 2], each a 32-bit word. ``counter``: four int64 tensors of 32-bit words that broadcast with
    key[..., 0]. Returns four int64 tensors, each 0 <= word < 2**32.
    """
    k0, k1 = key[..., 0], key[..., 1]
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; int64 cannot hold it unsigned, so it is put together."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard Gumbel noise [n, vocab_size] float32, a pure function of each row's seed and position.

    ``seeds``: int64 [n], the 64 bits of an unsigned seed. ``positions``: int64 [n], the position of the
    sampled token in its sequence. Word ``v % 4`` of counter ``v // 4`` belongs to vocabulary entry ``v``.
    """
    groups = -(-vocab_size // 4)
    key = torch.stack([seeds & _MASK, (seeds >> 32) & _MASK], dim=-1)[:, None, :]
    counter = torch.arange(groups, device=seeds.device)[None, :]
    where = positions[:, None]
    zero = torch.zeros_like(where)
    words = torch.stack(philox(key, [counter, where & _MASK, where >> 32, zero]), dim=-1)
    # 23 bits and a half: never 0 and never 1, exact in float32.
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform.flatten(1)[:, :vocab_size]))
