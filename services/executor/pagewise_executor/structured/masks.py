"""Masks of tokens: from bits, as grammars give them, to what logits are filled with."""

import numpy as np
import numpy.typing as npt
import torch

from pagewise_executor.uploads import Uploads


def forbidden_tokens(allowed: npt.NDArray[np.int32], vocab_size: int, upload: Uploads) -> torch.Tensor:
    """Return bool [n, vocab_size] on the device: the tokens whose bits are not set.

    ``allowed`` int32 [n, words]: token t is allowed if bit t % 32 of word t // 32 is set. Only the bits are uploaded.
    """
    packed = np.invert(allowed).view(np.uint8)
    if upload.device.type != "cuda":
        bits = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    on_device = upload(packed)
    shifts = torch.arange(8, dtype=torch.uint8, device=on_device.device)
    return ((on_device[:, :, None] >> shifts) & 1).view(len(packed), -1)[:, :vocab_size].bool()
