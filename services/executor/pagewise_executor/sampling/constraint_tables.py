"""The token constraints of requests as tables that the sampler applies, shared by all rows that have the same ones."""

from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.sampling import TokenConstraints

from pagewise_executor.uploads import Uploads

_TOKEN_BYTES = 4


@dataclass(slots=True, frozen=True, eq=False, weakref_slot=True)
class ConstraintTable:
    """The token constraints of a request as masks and lists of tokens.

    Fields:
        forbidden: bool [vocab] on the device: the tokens that may never be sampled; None: there are none.
        biased, biases: int64 [n] and float32 [n] on the host: tokens, and the biases of their logits.
        bad_words: by the last token but one (int32 bytes) of a bad word of several tokens: all of them but the last
            (int32 bytes), and the last.
    """

    forbidden: torch.Tensor | None
    biased: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    bad_words: dict[bytes, list[tuple[bytes, int]]]

    def completing(self, history: bytearray) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens behind ``history`` (int32 bytes)."""
        words = self.bad_words.get(bytes(history[-_TOKEN_BYTES:]), ())
        return [last for beginning, last in words if history.endswith(beginning)]


NO_CONSTRAINTS = ConstraintTable(None, np.zeros(0, np.int64), np.zeros(0, np.float32), {})


class ConstraintTables:
    """The tables of the rows' constraints. A table is dropped when no row has it any more."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._upload = Uploads(device)
        self._tables: WeakValueDictionary[TokenConstraints, ConstraintTable] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, constraints: TokenConstraints) -> ConstraintTable:
        """Return the table of these constraints, the same one for equal constraints as long as a row holds it."""
        if (table := self._tables.get(constraints)) is None:
            table = self._tables[constraints] = self._table(constraints)
        return table

    def _table(self, constraints: TokenConstraints) -> ConstraintTable:
        never = np.frombuffer(b"".join(word for word in constraints.bad_words if len(word) == _TOKEN_BYTES), np.int32)
        forbidden: torch.Tensor | None = None
        if constraints.allowed or len(never):
            mask = np.zeros(self._vocab_size, np.bool_)
            if constraints.allowed:
                bits = np.unpackbits(np.frombuffer(constraints.allowed, np.uint8), bitorder="little")
                allowed = bits[: self._vocab_size]
                mask[len(allowed) :] = True
                mask[: len(allowed)] = allowed == 0
            mask[never] = True
            forbidden = self._upload(mask)
        bad_words: dict[bytes, list[tuple[bytes, int]]] = {}
        for word in constraints.bad_words:
            if beginning := word[:-_TOKEN_BYTES]:
                last = int.from_bytes(word[-_TOKEN_BYTES:], "little")
                bad_words.setdefault(beginning[-_TOKEN_BYTES:], []).append((beginning, last))
        return ConstraintTable(
            forbidden=forbidden,
            biased=np.frombuffer(constraints.biased, np.int32).astype(np.int64),
            biases=np.frombuffer(constraints.biases, np.float32),
            bad_words=bad_words,
        )
