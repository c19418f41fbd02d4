"""The weight files of a model, which are compared with it and read part by part."""

import logging
import re
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.four_bit_checkpoint import FourBitScheme, StoredFourBitLinear
from pagewise_executor.models.four_bit_linear import FourBitLinear
from pagewise_executor.models.four_bit_weight import FourBitWeight
from pagewise_executor.models.gguf_checkpoint import GgufEmbedding, GgufScheme, StoredGgufLinear
from pagewise_executor.models.gguf_weight import FORMATS, GgufWeight
from pagewise_executor.models.llama_config import NotReadableError
from pagewise_executor.models.long_rope import FixedRope
from pagewise_executor.models.mtp import is_of_mtp
from pagewise_executor.models.mxfp4_experts import Mxfp4Experts
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint, Scheme
from pagewise_executor.models.quantised_linear import QuantisedLinear
from pagewise_executor.models.quantised_weight import FP8, QuantisedWeight
from pagewise_executor.models.shards import Shards, Style, UnknownShardError, vocabulary_names
from pagewise_executor.models.weight_files import FileTensor, Headers, open_weights
from pagewise_executor.models.weight_report import FLOATS, Differences, Mismatch, check_differences, check_values

log = logging.getLogger(__name__)

_FREQUENCIES = re.compile(r"\.rotary_emb\.inv_freq$")
"""Old checkpoints carry the frequencies of RoPE, which follow from the configuration."""


class Checkpoint:
    """The weight files of a model. The constructor compares their headers with it; ``read`` reads the weights.

    ``name``: of the model, for errors. ``model``: a causal language model with a head ``lm_head``, or an EAGLE-3 head;
    its weights have no data before they are read. ``headers``: of the files. ``device``: the target of weights.
    ``quantised``: how linear layers are stored in fewer bits; None: they are not. ``tied``: the head has the weights of
    the embedding, unless the files have others for it. ``named``: from the name of a tensor in the files to its name in
    the model; None if the model does not have it. ``rope``: the result of ``fix_rope`` of the model.

    Raises:
        NotReadableError: the files do not have exactly the weights of the model, and are not quantised; or they have a
            tensor of a quantised layer that is not known.
        ModelError: linear layers are not stored in the format of ``quantised``, or weights are missing or have another
        shape.
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
        if tied:
            names = vocabulary_names(model)
            embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
            if head in tensors and embedding not in tensors:
                tensors[embedding] = tensors.pop(head)
            if embedding in tensors and tensors[embedding].info.dtype in FORMATS:
                # The head computes in another layout than the embedding is looked up in.
                tensors[head] = tensors[embedding]
                self._tied = tied = False
        if quantised is not None:
            place_stored(model, quantised, tensors)
        self._wanted = {own: StoredTensor(None, list(weight.shape)) for own, weight in model.state_dict().items()}
        # Buffers of checkpoints correct the choice of experts, which is computed in float32.
        self._wanted |= {own: StoredTensor(torch.float32, self._wanted[own].shape, FLOATS)
                         for own, _ in model.named_buffers() if own in self._wanted}  # fmt: skip
        self._wanted |= stored_tensors(model)
        self._takes_embedding = tied and not any(own.startswith("lm_head.") for own in tensors)
        if self._takes_embedding:
            del self._wanted["lm_head.weight"]
            self._tie()
        self._shards: Shards | None = None
        self._check(self._differences(), exactly=quantised is None)

    def _differences(self) -> Differences:
        """Compare the tensors of the files with the weights of the model, and keep the tensors that the model has.

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
            elif info.dtype not in weight.types and (weight.dtype is not None or info.dtype not in FORMATS):
                raise NotReadableError(f"its weight {name} is of type {info.dtype}")
        return Differences(self._wanted.keys() - self._tensors.keys(), mismatched, unexpected)

    def _check(self, found: Differences, *, exactly: bool) -> None:
        """Check that the files have the weights of the model; the errors are the constructor's.

        ``exactly``: any difference counts, because transformers can load the model, and reports the differences.
        """
        missing, mismatched, unexpected = found
        if exactly:
            different = [f"weight {own} is missing" for own in sorted(missing)]
            different += [f"weight {each.name} is {list(each.found)}, not {list(each.wanted)}" for each in mismatched]
            different += [f"tensor {own} has no place in the model" for own in unexpected]
            if different:
                raise NotReadableError(f"its {different[0]}")
            return
        modules = dict(self.model.named_modules())
        # A scale or a bias, which changes the results of a layer.
        foreign = [name for name in unexpected if name.rpartition(".")[0] in modules]
        if foreign and not missing and not mismatched:
            raise NotReadableError(f"its tensor {foreign[0]} is none that is known of this layer")
        check_differences(self._name, self._headers, found)

    def shard(self, ranks: Ranks) -> tuple[nn.Module, Shards | None]:
        """Return the model for its only rank, and None: it is not divided."""
        assert ranks.alone
        return self.model, None

    def _divide(self, part: nn.Module, ranks: Ranks, plan: Mapping[str, Style]) -> None:
        """Let ``model`` be a rank's ``part`` of it, without weights, which is divided by a ``plan``."""
        whole, self.model = self.model, part
        place_whole(part, whole)
        # Each rank reads its rows of the embedding as floats.
        self._wanted |= {own: StoredTensor(None, one.shape) for own, one in self._wanted.items()
                         if one.in_blocks and own == f"{vocabulary_names(whole).embedding}.weight"}  # fmt: skip
        self._shards = Shards(ranks, plan, vocabulary_names(part))

    def read(self, part: str, dtype: torch.dtype) -> None:
        """Read the weights of the module of ``model`` that is called ``part``, as ``dtype``, before it is replaced.

        A head that is tied to the embedding has to be read after it.

        Raises:
            OSError: a file cannot be read.
            ModelError: a file is damaged, or a weight is not finite.
            RuntimeError: there is not enough memory. ValueError: stored tensors are invalid.
            UnknownShardError: a quantised weight cannot be divided.
        """
        if part == "lm_head" and self._takes_embedding:
            self._tie()
            return
        weights: dict[str, torch.Tensor] = {}
        in_files: dict[str, torch.Tensor] = {}
        tensors = ((own, one) for own, one in self._tensors.items() if own.startswith(f"{part}."))
        # Each part opens the file anew: while it is open, its pages that were read count as this process's memory.
        for file, group in groupby(tensors, key=lambda entry: entry[1].file):
            with open_weights(file) as opened:
                for own, (_, name, _) in group:
                    wanted = self._wanted[own]
                    # Copied even where the type is the same: the original is the mapped file, which may change.
                    tensor = self._read_one(opened, own, name).to(self.device, wanted.dtype or dtype, copy=True)
                    in_files[name] = tensor
                    as_is = wanted.dtype is None or wanted.in_blocks
                    weights[own.removeprefix(f"{part}.")] = tensor if as_is else tensor.view(wanted.shape)
        self.model.get_submodule(part).load_state_dict(weights, assign=True)
        take_stored(self.model, part, dtype, self._shards)
        check_values(self._name, in_files, self._headers)
        if part == "lm_head" and self._tied:
            self._tie_equal()

    def _tie(self) -> None:
        """Let the head have the weights of the embedding."""
        self.model.lm_head.weight = self.model.get_input_embeddings().weight  # type: ignore[operator, union-attr]

    def _tie_equal(self) -> None:
        """Let head and embedding share weights that are equal in the files, as transformers does."""
        head, embedding = self.model.lm_head, self.model.get_input_embeddings()  # type: ignore[operator]
        if type(head) is nn.Linear and torch.equal(head.weight, embedding.weight):
            head.weight = embedding.weight
        else:
            log.warning(
                "%s: by config.json head and embedding have the same weights, but the files have others for the head, "
                "which are used", self._name,
            )  # fmt: skip

    def _read_one(self, opened: Any, own: str, name: str) -> torch.Tensor:
        in_blocks = self._tensors[own].info.dtype in FORMATS
        if self._wanted[own].dtype is not None or (self._shards is None and not in_blocks):
            return opened.get_tensor(name)  # type: ignore[no-any-return]
        if self._shards is None:
            return opened.get_slice(name)[...]  # type: ignore[no-any-return]
        return self._shards.read(opened.get_slice(name), own, list(self.model.get_parameter(own).shape))


def _tensors_of(
    model: nn.Module, headers: Headers, unread: re.Pattern[str], named: Callable[[str], str | None]
) -> dict[str, FileTensor]:
    """Return the tensors of the files by their names in the model, except names that match ``unread``.

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
                own = f"model.{own}"  # transformers saves a decoder alone without this prefix
            if own in found:
                raise NotReadableError(f"it has its weight {own} twice, by different names")
            found[own] = FileTensor(file, name, info)
    return found


_FLOATS = FLOATS - {"F64"}
_TYPES = {FP8: {"F8_E4M3"}, torch.int8: {"I8"}, torch.uint8: {"U8"}, torch.int32: {"I32"}, torch.int64: {"I64"}}


class StoredTensor(NamedTuple):
    """A tensor of the model. ``dtype``: the type that it keeps; None: the model's. ``types``: its types in files."""

    dtype: torch.dtype | None
    shape: list[int]
    types: frozenset[str] = FLOATS

    @property
    def in_blocks(self) -> bool:
        """Whether it keeps the blocks of a GGUF file, of which ``shape`` is the number of weights."""
        return self.dtype is not None and not self.types.isdisjoint(FORMATS)

    def shape_of(self, found: list[int]) -> list[int]:
        """Return ``shape`` if it differs from ``found`` by dimensions of 1 alone, in a tensor that keeps its type."""
        same = self.dtype is not None and [n for n in found if n != 1] == [n for n in self.shape if n != 1]
        return self.shape if same else found


_WEIGHTS = ("weight", "weight_packed", "qweight")
_ENDS = (*_WEIGHTS, "g_idx", "bias")
"""The ends of the names of a layer's tensors that tell how it is stored."""


class StoredLinear(nn.Module):
    """A quantised linear layer as the files have it, with the files' names of its parameters.

    ``scales``, ``input_scale``: the names of the scales, which differ. ``part``: the shape of a rank's part of it.
    """

    part: list[int] | None = None

    def __init__(self, scheme: Scheme, outs: int, ins: int, bias: bool, scales: str, input_scale: str) -> None:
        super().__init__()
        self.scheme, self.names = scheme, (scales, input_scale)
        self.block = (scheme.block[0] or outs, scheme.block[1] or ins)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((outs, ins), scheme.dtype)}
        if scheme.packed:
            shapes = {"weight_packed": ((outs, -(-ins // 4)), torch.int32), "weight_shape": ((2,), torch.int64)}
        shapes[scales] = (-(-outs // self.block[0]), -(-ins // self.block[1])), torch.float32
        if scheme.inputs.static:
            shapes[input_scale] = (1,), torch.float32
        if bias:
            shapes["bias"] = (outs,), torch.float32
        for name, (shape, dtype) in shapes.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.outs, self.ins = outs, ins

    def loaded(self, dtype: torch.dtype) -> QuantisedLinear:
        """Return the layer that computes with these weights, in a model of type ``dtype``.

        Raises:
            ValueError: packed weights are of another shape, or a static scale is not positive.
        """
        tensors = {name: weight.detach() for name, weight in self.named_parameters()}
        values = tensors.get("weight")
        if values is None:
            if tensors["weight_shape"].tolist() != [self.outs, self.ins]:
                raise ValueError(f"packed weights are {tensors['weight_shape'].tolist()}, not {[self.outs, self.ins]}")
            # Bytes in the order of the inputs, with 128 added.
            packed = tensors["weight_packed"].view(torch.uint8)[:, : self.ins]
            values = packed.bitwise_xor(128).view(torch.int8).contiguous()
        static = tensors.get(self.names[1])
        if static is not None and not 0 < float(static) < float("inf"):
            raise ValueError(f"{self.names[1]} of a layer is {float(static)}: inputs cannot be divided by that")
        weight = QuantisedWeight(values, tensors[self.names[0]], self.block)
        return QuantisedLinear(weight, self.scheme.inputs, dtype, tensors.get("bias"), static)


def place_stored(model: nn.Module, checkpoint: QuantisedCheckpoint, tensors: Mapping[str, FileTensor]) -> None:
    """Replace the linear layers of a model that are quantised in the files. ``tensors``: by their names in the model.

    Raises:
        ModelError: a weight and the configuration differ in type.
    """
    for name, module in list(model.named_modules()):
        stored = tensors[f"{name}.weight"].info.dtype if f"{name}.weight" in tensors else None
        if isinstance(module, nn.Embedding) and stored in FORMATS:
            model.set_submodule(name, GgufEmbedding(GgufScheme(stored), module))
        if type(module) is nn.Linear:
            ends = [end for end in _ENDS if f"{name}.{end}" in tensors]
            there, stored = name, None
            if ends and ends[0] in _WEIGHTS:
                found = tensors[f"{name}.{ends[0]}"]
                there, stored = found.name.rpartition(".")[0], found.info.dtype
            if stored in FLOATS and (is_of_mtp(name) or is_of_mtp(there)):
                continue  # tools leave MTP layers as they are, whether or not they list them
            scheme, (outs, ins) = checkpoint.scheme(there, stored), module.weight.shape
            if isinstance(scheme, GgufScheme):
                model.set_submodule(name, StoredGgufLinear(scheme, outs, ins, module.bias is not None))
            elif isinstance(scheme, FourBitScheme):
                own = StoredFourBitLinear(scheme, outs, ins, module.bias is not None, ends)
                model.set_submodule(name, own)
            elif scheme is not None:
                # transformers writes the second name of each for quant_method fp8.
                names = [
                    second if f"{name}.{second}" in tensors else first
                    for first, second in (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale"))
                ]
                model.set_submodule(name, StoredLinear(scheme, outs, ins, module.bias is not None, *names))


def place_whole(model: nn.Module, whole: nn.Module) -> None:
    """Replace linear layers of a rank's part of a model by the stored ones of the ``whole`` model.

    They are read whole, one part of the model at a time, and then cut: blocks of scales do not end where parts do.
    """
    for name, module in whole.named_modules():
        if isinstance(module, StoredLinear | StoredFourBitLinear | StoredGgufLinear):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            module.part = list(linear.weight.shape)
            model.set_submodule(name, module)


def stored_tensors(model: nn.Module) -> dict[str, StoredTensor]:
    """Return the weights and scales of all stored layers and experts of a model, by their names."""
    found: dict[str, StoredTensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, StoredGgufLinear | GgufEmbedding):
            found[f"{name}.weight"] = StoredTensor(torch.uint8, module.shape, frozenset({module.kind}))
        elif isinstance(module, StoredLinear | StoredFourBitLinear | Mxfp4Experts):
            for own, weight in module.named_parameters():
                if not own.endswith("bias"):
                    types = frozenset(_TYPES.get(weight.dtype, _FLOATS))
                    found[f"{name}.{own}"] = StoredTensor(weight.dtype, list(weight.shape), types)
    return found


def take_stored(model: nn.Module, within: str, dtype: torch.dtype, shards: Shards | None = None) -> None:
    """Replace the stored layers within a part of a model, whose tensors have been read, by layers that compute.

    Raises:
        ValueError: packed weights or static scales are invalid. UnknownShardError: a weight cannot be divided.
    """
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if isinstance(module, StoredLinear | StoredFourBitLinear | StoredGgufLinear):
            linear: Stored = (
                module.loaded(dtype) if isinstance(module, StoredLinear) else FourBitLinear(*module.loaded())
            )
            if shards is not None and module.part is not None:
                linear = part_of(linear, name, module.part, shards)
            model.set_submodule(name, linear)


Stored = QuantisedLinear | FourBitLinear


def part_of(linear: Stored, name: str, shape: list[int], shards: Shards) -> Stored:
    """Return a rank's part of a quantised layer: a weight of this ``shape``, some of its outputs or of its inputs.

    A layer of which each rank has some inputs has its bias on rank 0 alone (``Shards.read``), and rounds by its inputs.

    Raises:
        UnknownShardError: the outputs cannot be divided.
    """
    (outs, ins), weight = linear.weight.shape, linear.quantised
    shards.note(name, (outs, ins))
    bias: torch.Tensor | None = linear.bias
    if shape[0] < outs:
        if outs % shape[0]:
            raise UnknownShardError(
                f"--tensor-parallel: {name} is quantised, and its {outs} outputs are no multiple of {shape[0]}"
            )
        start, stop = shards.span(outs, shape[0])
        weight, bias = weight.rows(start, stop), None if bias is None else bias[start:stop]
    if shape[1] < ins:
        try:
            weight = weight.columns(*shards.span(ins, shape[1]))
        except ValueError as error:
            raise UnknownShardError(f"--tensor-parallel: {name} cannot be divided: {error}") from error
    if isinstance(weight, FourBitWeight | GgufWeight):
        return FourBitLinear(weight, bias)
    assert isinstance(linear, QuantisedLinear)
    return QuantisedLinear(weight, linear.inputs, linear.weight.dtype, bias, linear.static_scale)
