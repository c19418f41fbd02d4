"""The weight files of a model, which are compared with it and read part by part."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.llama_config import NotReadableError
from pagewise_executor.models.long_rope import FixedRope
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.shards import Shards, vocabulary_names
from pagewise_executor.models.stored_linear import place_stored, stored_tensors, take_stored
from pagewise_executor.models.weight_files import Headers, open_weights
from pagewise_executor.models.weight_report import FLOATS, Differences, Mismatch, check_differences, check_values

log = logging.getLogger(__name__)

_FREQUENCIES = ".rotary_emb.inv_freq"
"""Old checkpoints carry the frequencies of RoPE, which follow from the configuration."""


class Checkpoint:
    """The weight files of a model. Their headers have been compared with the model; ``read`` reads the weights.

    ``rope``: what ``fix_rope`` has made of the model.

    ``model``: a causal language model with a head ``lm_head``; its weights have no data before they are read.
    ``headers``: of each file, as safetensors has them: by the name of a tensor its ``dtype`` and ``shape``. ``device``:
    where weights go. ``quantised``: how linear layers are stored in eight bits, if they are. ``tied``: the head has the
    weights of the embedding, unless the files have others for it. ``named``: from the name of a tensor in the files to
    that in the model, None if the model does not have it.

    Raises:
        NotReadableError: the files do not have exactly the weights of the model, and are not quantised; or they have a
            tensor of a quantised layer that is not known.
        ModelError: linear layers are not stored as ``quantised`` says, or weights are missing or have another shape.
    """

    rope = FixedRope()

    def __init__(
        self,
        model: nn.Module,
        headers: Headers,
        device: torch.device,
        quantised: QuantisedCheckpoint | None = None,
        *,
        tied: bool,
        named: Callable[[str], str | None] = str,
    ) -> None:
        self.model, self.device, self._headers = model, device, headers
        self._quantised = quantised is not None
        self._name = str(next(iter(headers)).parent) if quantised is None else quantised.name
        embedding, head = (f"{name}.weight" for name in vocabulary_names(model))
        modules = {name for name, _ in model.named_modules()}
        # By the name in the model, that in the file.
        self._names: dict[Path, dict[str, str]] = {file: {} for file in headers}
        types: dict[str, str] = {}
        for file, header in headers.items():
            for name in header:
                if name.endswith(_FREQUENCIES) or (quantised is not None and not quantised.is_read(name)):
                    continue
                if (own := named(name)) is None:
                    continue
                if own.rpartition(".")[0] not in modules and f"model.{own}".rpartition(".")[0] in modules:
                    own = f"model.{own}"  # the files are those of a decoder, which transformers saves without a prefix
                if own in types:
                    raise NotReadableError(f"it has its weight {own} twice, by different names")
                self._names[file][own] = name
                types[own] = header[name]["dtype"]
        if tied and head in types and embedding not in types:
            for names in self._names.values():
                if head in names:
                    names[embedding] = names.pop(head)
            types[embedding] = types.pop(head)
        self._tied, self._has_head = tied, any(name.startswith("lm_head.") for name in types)
        if quantised is not None:
            known = {own: name for names in self._names.values() for own, name in names.items()}
            place_stored(self.model, quantised, types, known)
        self._stored = stored_tensors(self.model)
        self._shards: Shards | None = None
        self._compare(types)

    def _compare(self, types: Mapping[str, str]) -> None:
        """Compare the tensors of the files with the weights of the model, and keep the names of those that it has.

        Raises:
            NotReadableError, ModelError: see the class.
        """
        wanted = {name: list(weight.shape) for name, weight in self.model.state_dict().items()}
        if self._tied and not self._has_head:
            del wanted["lm_head.weight"]
        mismatched, unexpected = [], []
        for file, names in self._names.items():
            for own, name in list(names.items()):
                shape = self._headers[file][name]["shape"]
                stored = self._stored.get(own)
                if own not in wanted:
                    unexpected.append(name)
                    del names[own]
                elif (stored.shape_of(shape) if stored else shape) != wanted[own]:
                    mismatched.append(Mismatch(name, shape, wanted[own]))
                elif types[own] not in (stored.types if stored else FLOATS):
                    raise NotReadableError(f"its weight {name} is of type {types[own]}")
        missing = wanted.keys() - types.keys()
        if not self._quantised:  # transformers loads it, and reports what it finds
            if flawed := [*sorted(missing), *(each.name for each in mismatched), *unexpected]:
                raise NotReadableError(f"its weight {flawed[0]} is missing, or has an unexpected name or shape")
            return
        if not missing and not mismatched:
            modules = dict(self.model.named_modules())
            for name in unexpected:
                if name.rpartition(".")[0] in modules:  # a scale or a bias, which changes what a layer computes
                    raise NotReadableError(f"its tensor {name} is none that is known of this layer")
        check_differences(self._name, self._headers, Differences(missing, mismatched, unexpected))

    def shard(self, ranks: Ranks) -> tuple[nn.Module, Shards | None]:
        """Return the part of the model that this rank holds, which is the only one, and how the model is divided."""
        assert ranks.alone
        return self.model, None

    def read(self, part: str, dtype: torch.dtype) -> None:
        """Read the weights of the module of ``model`` that is called ``part``, as ``dtype``, before it is replaced.

        A head that is tied to the embedding has to be read after it.

        Raises:
            OSError: a file cannot be read.
            ModelError: a file is damaged, or a weight is not finite.
            RuntimeError: there is not enough memory. ValueError: stored tensors are not what they should be.
            UnknownShardError: a quantised weight cannot be divided.
        """
        if part == "lm_head" and self._tied and not self._has_head:
            self.model.lm_head.weight = self.model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
            return
        weights, read = {}, []
        for file, names in self._names.items():
            own = {name: there for name, there in names.items() if name.startswith(f"{part}.")}
            if not own:
                continue
            # Opened for each part anew: while a file is open, what has been read of it counts as this process's memory.
            with open_weights(file) as opened:
                for name, there in own.items():
                    stored = self._stored.get(name)
                    kind = dtype if stored is None else stored.dtype
                    # A copy even where the type is the same: the original is the file, which may change or go.
                    tensor = self._read_one(opened, name, there).to(self.device, kind, copy=True)
                    if tensor.is_floating_point():
                        read.append((there, tensor))
                    weights[name.removeprefix(f"{part}.")] = tensor if stored is None else tensor.view(stored.shape)
        self.model.get_submodule(part).load_state_dict(weights, assign=True)
        take_stored(self.model, part, dtype, self._shards)
        check_values(self._name, read, self._headers)
        if part == "lm_head" and self._tied:
            self._tie_equal()

    def _tie_equal(self) -> None:
        """Let head and embedding share their weights if the files have the same values for both, as transformers does.

        If the files have others, the head keeps its own.
        """
        head, embedding = self.model.lm_head, self.model.get_input_embeddings()  # type: ignore[operator]
        if type(head) is nn.Linear and torch.equal(head.weight, embedding.weight):
            head.weight = embedding.weight
        else:
            log.warning(
                "%s: by config.json head and embedding have the same weights, but the files have others for the head, "
                "which are used", self._name,
            )  # fmt: skip

    def _read_one(self, opened: Any, name: str, there: str) -> torch.Tensor:
        if self._shards is None or name in self._stored:
            return opened.get_tensor(there)  # type: ignore[no-any-return]
        return self._shards.read(opened.get_slice(there), name, list(self.model.get_parameter(name).shape))
