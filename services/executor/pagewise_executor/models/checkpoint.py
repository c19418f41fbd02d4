"""The weight files of a model, which are compared with it and read part by part."""

import logging
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import nn

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.llama_config import NotReadableError
from pagewise_executor.models.long_rope import FixedRope
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.shards import Shards, vocabulary_names
from pagewise_executor.models.stored_linear import StoredTensor, place_stored, stored_tensors, take_stored
from pagewise_executor.models.weight_files import FileTensor, Headers, open_weights
from pagewise_executor.models.weight_report import Differences, Mismatch, check_differences, check_values

log = logging.getLogger(__name__)

_FREQUENCIES = re.compile(r"\.rotary_emb\.inv_freq$")
"""Old checkpoints carry the frequencies of RoPE, which follow from the configuration."""


class Checkpoint:
    """The weight files of a model. Their headers have been compared with the model; ``read`` reads the weights.

    ``rope``: the result of ``fix_rope`` of the model.

    ``name``: of the model, for errors. ``model``: a causal language model with a head ``lm_head``; its weights have no
    data before they are read. ``headers``: of the files. ``device``: where weights go. ``quantised``: how linear layers
    are stored in eight bits, if they are. ``tied``: the head has the weights of the embedding, unless the files have
    others for it. ``named``: from the name of a tensor in the files to its name in the model; None if the model does
    not have it.

    Raises:
        NotReadableError: the files do not have exactly the weights of the model, and are not quantised; or they have a
            tensor of a quantised layer that is not known.
        ModelError: linear layers are not stored as ``quantised`` says, or weights are missing or have another shape.
    """

    rope = FixedRope()

    def __init__(
        self,
        name: str,
        model: nn.Module,
        headers: Headers,
        device: torch.device,
        quantised: QuantisedCheckpoint | None = None,
        *,
        tied: bool,
        named: Callable[[str], str | None] = str,
    ) -> None:
        self.model, self.device, self._name, self._headers, self._tied = model, device, name, headers, tied
        unread = _FREQUENCIES if quantised is None else quantised.unread
        self._tensors = tensors = _tensors_of(model, headers, unread, named)
        names = vocabulary_names(model)
        embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
        if tied and head in tensors and embedding not in tensors:
            tensors[embedding] = tensors.pop(head)
        if quantised is not None:
            place_stored(model, quantised, tensors)
        self._wanted = {own: StoredTensor(None, list(weight.shape)) for own, weight in model.state_dict().items()}
        self._wanted |= stored_tensors(model)
        self._takes_embedding = tied and not any(own.startswith("lm_head.") for own in tensors)
        if self._takes_embedding:
            del self._wanted["lm_head.weight"]
        self._shards: Shards | None = None
        self._check(self._differences(), exactly=quantised is None)

    def _differences(self) -> Differences:
        """Compare the tensors of the files with the weights of the model, and keep those that the model has.

        Raises:
            NotReadableError: a weight is of another type.
        """
        mismatched, unexpected = [], []
        for own, (_, name, info) in list(self._tensors.items()):
            if (weight := self._wanted.get(own)) is None:
                unexpected.append(name)
                del self._tensors[own]
            elif weight.shape_of(info.shape) != weight.shape:
                mismatched.append(Mismatch(name, info.shape, weight.shape))
            elif info.dtype not in weight.types:
                raise NotReadableError(f"its weight {name} is of type {info.dtype}")
        return Differences(self._wanted.keys() - self._tensors.keys(), mismatched, unexpected)

    def _check(self, found: Differences, *, exactly: bool) -> None:
        """Check that the files have the weights of the model.

        ``exactly``: any difference counts, because transformers can load the model, and reports the differences.

        Raises:
            NotReadableError, ModelError: see the class.
        """
        missing, mismatched, unexpected = found
        if exactly:
            if flawed := [*sorted(missing), *(each.name for each in mismatched), *unexpected]:
                raise NotReadableError(f"its weight {flawed[0]} is missing, or has an unexpected name or shape")
            return
        modules = dict(self.model.named_modules())
        # A scale or a bias, which changes the results of a layer.
        foreign = [name for name in unexpected if name.rpartition(".")[0] in modules]
        if foreign and not missing and not mismatched:
            raise NotReadableError(f"its tensor {foreign[0]} is none that is known of this layer")
        check_differences(self._name, self._headers, found)

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
        if part == "lm_head" and self._takes_embedding:
            self.model.lm_head.weight = self.model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
            return
        weights: dict[str, torch.Tensor] = {}
        in_files: dict[str, torch.Tensor] = {}
        tensors = ((own, one) for own, one in self._tensors.items() if own.startswith(f"{part}."))
        # Opened for each part anew: while a file is open, what has been read of it counts as this process's memory.
        for file, group in groupby(tensors, key=lambda entry: entry[1].file):
            with open_weights(file) as opened:
                for own, (_, name, _) in group:
                    wanted = self._wanted[own]
                    # A copy even where the type is the same: the original is the file, which may change or go.
                    tensor = self._read_one(opened, own, name).to(self.device, wanted.dtype or dtype, copy=True)
                    in_files[name] = tensor
                    weights[own.removeprefix(f"{part}.")] = tensor.view(wanted.shape) if wanted.dtype else tensor
        self.model.get_submodule(part).load_state_dict(weights, assign=True)
        take_stored(self.model, part, dtype, self._shards)
        check_values(self._name, in_files, self._headers)
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

    def _read_one(self, opened: Any, own: str, name: str) -> torch.Tensor:
        if self._shards is None or self._wanted[own].dtype is not None:
            return opened.get_tensor(name)  # type: ignore[no-any-return]
        return self._shards.read(opened.get_slice(name), own, list(self.model.get_parameter(own).shape))


def _tensors_of(
    model: nn.Module, headers: Headers, unread: re.Pattern[str], named: Callable[[str], str | None]
) -> dict[str, FileTensor]:
    """Return the tensors of the files by their names in the model, but for those whose names match ``unread``.

    ``named``: see ``Checkpoint``.

    Raises:
        NotReadableError: two tensors have one name in the model.
    """
    modules = dict(model.named_modules())
    found: dict[str, FileTensor] = {}
    for file, header in headers.items():
        for name, info in header.items():
            own = None if unread.search(name) else named(name)
            if own is None:
                continue
            if own.rpartition(".")[0] not in modules and f"model.{own}".rpartition(".")[0] in modules:
                own = f"model.{own}"  # the files are those of a decoder, which transformers saves without a prefix
            if own in found:
                raise NotReadableError(f"it has its weight {own} twice, by different names")
            found[own] = FileTensor(file, name, info)
    return found
