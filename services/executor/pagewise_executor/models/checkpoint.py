"""The weight files of a model, which are compared with it and read part by part."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.llama_config import NotReadableError
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.shards import Shards
from pagewise_executor.models.stored_linear import place_stored, stored_tensors, take_stored

_TYPES = {"F32", "BF16", "F16"}
_FREQUENCIES = ".rotary_emb.inv_freq"
"""Old checkpoints carry the frequencies of RoPE, which follow from the configuration."""


class Checkpoint:
    """The weight files of a model. Their headers have been compared with the model; ``read`` reads the weights.

    ``fixed``: which rope types were fixed to the longest sequence, see ``fix_rope``.

    ``model``: a causal language model with a head ``lm_head``; its weights have no data before they are read.
    ``headers``: of each file, as safetensors has them: by the name of a tensor its ``dtype`` and ``shape``. ``device``:
    where weights go. ``quantised``: how linear layers are stored in eight bits, if they are. ``tied``: the head has the
    weights of the embedding. ``named``: from the name of a tensor in the files to that in the model, None if the model
    does not have it.

    Raises:
        NotReadableError: the files do not have exactly the weights of the model.
        ModelError: linear layers are not stored as ``quantised`` says.
    """

    fixed: Sequence[str] = ()

    def __init__(
        self,
        model: nn.Module,
        headers: Mapping[Path, Mapping[str, Any]],
        device: torch.device,
        quantised: QuantisedCheckpoint | None = None,
        *,
        tied: bool,
        named: Callable[[str], str | None] = str,
    ) -> None:
        self.model, self.device, self._tied = model, device, tied
        # By the name in the model, that in the file.
        self._names: dict[Path, dict[str, str]] = {}
        types: dict[str, str] = {}
        for file, header in headers.items():
            self._names[file] = {
                own: name
                for name in header
                if name != "__metadata__"
                and not name.endswith(_FREQUENCIES)
                and (quantised is None or quantised.is_read(name))
                and (own := named(name)) is not None
            }
            types |= {own: header[name]["dtype"] for own, name in self._names[file].items()}
        if quantised is not None:
            known = {own: name for names in self._names.values() for own, name in names.items()}
            place_stored(self.model, quantised, types, known)
        self._stored = stored_tensors(self.model)
        self._shards: Shards | None = None
        wanted = {name: list(weight.shape) for name, weight in self.model.state_dict().items()}
        if tied:
            del wanted["lm_head.weight"]
        for file, names in self._names.items():
            for own, name in names.items():
                shape = headers[file][name]["shape"]
                stored = self._stored.get(own)
                if (stored.shape_of(shape) if stored else shape) != wanted.pop(own, None):
                    raise NotReadableError(f"its weight {name} has an unexpected name or shape")
                if types[own] not in (stored.types if stored else _TYPES):
                    raise NotReadableError(f"its weight {name} is of type {types[own]}")
        if wanted:
            raise NotReadableError(f"it has no weight {min(wanted)}")

    def shard(self, ranks: Ranks) -> tuple[nn.Module, Shards | None]:
        """Return the part of the model that this rank holds, which is the only one, and how the model is divided."""
        assert ranks.alone
        return self.model, None

    def read(self, part: str, dtype: torch.dtype) -> None:
        """Read the weights of the module of ``model`` that is called ``part``, as ``dtype``, before it is replaced.

        A head that is tied to the embedding has to be read after it.

        Raises:
            OSError: a file cannot be read.
            RuntimeError: there is not enough memory. ValueError: stored tensors are not what they should be.
            UnknownShardError: a quantised weight cannot be divided.
        """
        if part == "lm_head" and self._tied:
            self.model.lm_head.weight = self.model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
            return
        weights = {}
        for file, names in self._names.items():
            own = {name: there for name, there in names.items() if name.startswith(f"{part}.")}
            if not own:
                continue
            # Opened for each part anew: while a file is open, what has been read of it counts as this process's memory.
            with safe_open(file, framework="pt") as opened:
                for name, there in own.items():
                    stored = self._stored.get(name)
                    kind = dtype if stored is None else stored.dtype
                    # A copy even where the type is the same: the original is the file, which may change or go.
                    tensor = self._read_one(opened, name, there).to(self.device, kind, copy=True)
                    weights[name.removeprefix(f"{part}.")] = tensor if stored is None else tensor.view(stored.shape)
        self.model.get_submodule(part).load_state_dict(weights, assign=True)
        take_stored(self.model, part, dtype, self._shards)

    def _read_one(self, opened: Any, name: str, there: str) -> torch.Tensor:
        if self._shards is None or name in self._stored:
            return opened.get_tensor(there)  # type: ignore[no-any-return]
        return self._shards.read(opened.get_slice(there), name, list(self.model.get_parameter(name).shape))
