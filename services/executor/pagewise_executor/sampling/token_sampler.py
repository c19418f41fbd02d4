"""Samples tokens from processed logits: temperature, top-k, top-p and min-p, then Gumbel-max, once per row."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.uploads import Uploads

if TYPE_CHECKING:
    from pagewise_kernels.sampling import SamplingTensors

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_NEGATIVE = float("-inf")


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
    """Return the high and the low 32 bits of a 32 x 32 bit product, which int64 cannot hold unsigned."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard Gumbel noise [n, vocab_size] float32, a pure function of each row's seed and position.

    ``seeds``: int64 [n], the 64 bits of an unsigned seed. ``positions``: int64 [n], the position of the sampled token
    in its sequence. Word ``v % 4`` of counter ``v // 4`` belongs to vocabulary entry ``v``.
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


class TorchTokenSampler:
    """Keeps the sampling parameters of each row, and samples its tokens in PyTorch, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._params: dict[int, SamplingParams] = {}

    def join(self, row: int, params: SamplingParams) -> None:
        """Keep the parameters of the sequence that joins in ``row``."""
        self._params[row] = params

    def leave(self, row: int) -> None:
        """Forget the parameters of the sequence in ``row``."""
        self._params.pop(row, None)

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor, on_device: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sample one token for each of ``rows``; return int64 [n].

        ``logits``: float32 [n, vocab]. ``positions`` int64 [n]: the positions of the sampled tokens in their sequences,
        which key the random numbers. ``on_device`` int32 [n]: the rows on the device; None: they are not there yet.
        """
        tokens = logits.argmax(dim=-1)
        random = [i for i, row in enumerate(rows) if self._params[row].temperature > 0]
        if random:
            index = torch.tensor(random, device=self._device)
            params = [self._params[rows[i]] for i in random]
            seeds = torch.tensor([_as_int64(p.seed) for p in params], device=self._device)
            tokens[index] = sample_tokens(logits[index], params, seeds, positions[index])
        return tokens


class TritonTokenSampler:
    """Samples by the Triton kernel from the parameters of ``num_rows`` rows, and one for padding, on the device."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        from pagewise_kernels.sampling import SamplingTensors, sample

        def filled(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_rows + 1,), value, dtype=dtype, device=device)

        self._sample = sample
        self._upload = Uploads(device)
        self._joined: dict[int, SamplingParams] = {}
        self._parameters = SamplingTensors(
            filled(0.0, torch.float32),
            filled(0, torch.int32),
            filled(1.0, torch.float32),
            filled(0.0, torch.float32),
            filled(0, torch.int64),
        )

    def join(self, row: int, params: SamplingParams) -> None:
        """Keep the parameters of the sequence that joins in ``row``."""
        self._joined[row] = params

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row`` if its parameters have not been uploaded yet."""
        self._joined.pop(row, None)

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor, on_device: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sample one token for each of ``rows``, as ``TorchTokenSampler.sample`` does."""
        held = self._upload(np.array(rows, np.int32)) if on_device is None else on_device
        return self._sample(logits, self.parameters(), held, positions)

    def parameters(self) -> "SamplingTensors":
        """Return the parameters of all rows. They are always the same tensors, so that CUDA graphs may read them."""
        if self._joined:
            params, held = self._joined.values(), self._parameters
            integers = [list(self._joined), [p.top_k for p in params], [_as_int64(p.seed) for p in params]]
            floats = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
            (where, top_k, seeds), (temperature, top_p, min_p) = self._upload.together(
                np.array(integers, np.int64), np.array(floats, np.float32)
            )
            tensors = held.temperature, held.top_k, held.top_p, held.min_p, held.seeds
            new = temperature, top_k.to(torch.int32), top_p, min_p, seeds
            for tensor, values in zip(tensors, new, strict=True):
                tensor.index_copy_(0, where, values)
            self._joined.clear()
        return self._parameters


TokenSampler = TorchTokenSampler | TritonTokenSampler


def _as_int64(seed: int) -> int:
    """Return the int64 that has the same 64 bits as an unsigned seed."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def sample_tokens(
    logits: torch.Tensor, params: list[SamplingParams], seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample one token per row [n] from softmax(logits / temperature), filtered, without computing that softmax."""
    vocab_size, device = logits.shape[-1], logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    logits = logits / temperature[:, None]
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], device=device).log()  # log 0 = -inf switches it off
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], _NEGATIVE)
    if any(0 < p.top_k < vocab_size or p.top_p < 1 for p in params):
        logits = _filter_top(logits, params)
    return (logits + gumbel_noise(seeds, positions, vocab_size)).argmax(dim=-1)


def _filter_top(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Keep the top_k most likely entries, and of these the fewest whose probabilities add up to top_p."""
    vocab_size, device = logits.shape[-1], logits.device
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=device)
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= top_k[:, None], _NEGATIVE)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = torch.tensor([p.top_p for p in params], device=device)
    # The most likely entry always stays; a top_p of 1 must not lose the tail to rounding.
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, _NEGATIVE)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
