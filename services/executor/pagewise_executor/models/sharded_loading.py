"""Loads one rank's part of a model of transformers, and reads only that part of its weight files."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.shards import Shards, Slice, UnknownShardError, vocabulary_names
from pagewise_executor.models.weight_files import Headers, open_weights
from pagewise_executor.models.weight_report import Differences, Mismatch, differences_of

_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


class _LazyPart:
    """A weight of the checkpoint in the state dict of transformers, which reads ``[...]`` of it when it needs it."""

    def __init__(self, source: Slice, shards: Shards, name: str, shape: list[int]) -> None:
        self._source, self._shards, self._name, self._shape = source, shards, name, shape

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._shards.read(self._source, self._name, self._shape)


def load_part(
    whole: Any,
    part: Any,
    headers: Headers,
    dtype: torch.dtype,
    ranks: Ranks,
    attention: str,
    *,
    trust_remote_code: bool,
) -> tuple[torch.nn.Module, Shards, Differences]:
    """Return a rank's part of a model, in host memory, how the model is divided, and how its files differ from it.

    ``whole``, ``part``: the configurations of the model and of the part. ``headers``: of the files. ``attention``: the
    name of the attention function.

    Raises:
        UnknownShardError: the model has no plan, or one that does not say how a weight is divided.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        complete, empty = (
            AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
            )
            for config in (whole, part)
        )
    shards = Shards(ranks, _plan(empty), vocabulary_names(empty))
    name_of = _names(empty)
    wanted, sizes = (
        {name: list(weight.shape) for name, weight in model.state_dict().items()} for model in (empty, complete)
    )
    mismatched: list[Mismatch] = []
    weights: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in headers:
            opened = stack.enter_context(open_weights(file))
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                name, joined = name_of(key)
                found = list(opened.get_slice(key).get_shape())
                # A part of a weight that is too large may have the right size. The shapes of weights that are joined to
                # others are compared after the join.
                if not joined and found != sizes.get(name, found):
                    mismatched.append(Mismatch(key, found, sizes[name]))
                # transformers reports weights that the model does not have.
                weights[key] = _LazyPart(opened.get_slice(key), shards, name, wanted.get(name, found))
        if mismatched:
            return empty, shards, Differences(mismatched=mismatched)
        model, info = type(empty).from_pretrained(
            None,
            config=part,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,  # they are reported with the others
            output_loading_info=True,
        )
    return model, shards, differences_of(info)


def _plan(model: Any) -> dict[str, str]:
    """Return the plan of a model of transformers for tensor parallelism.

    Raises:
        UnknownShardError: it has none, or one that is not known here.
    """
    plan: dict[str, str] = model.tp_plan
    if not plan:
        raise UnknownShardError(
            f"--tensor-parallel: transformers says for no layer of {type(model).__name__} how it can be divided"
        )
    styles = {name.rpartition(".")[2]: style for name, style in plan.items()}
    if {name: styles.get(name) for name in _ATTENTION} != _ATTENTION:
        # Otherwise Q, K and V lie in one weight, in an order that cutting it does not keep.
        raise UnknownShardError(
            f"--tensor-parallel: attention of {type(model).__name__} has no projections that can be divided by heads"
        )
    return plan


def _names(model: Any) -> Callable[[str], tuple[str, bool]]:
    """Return a function from the name of a tensor in the files to its name in a model of transformers.

    It also returns whether the tensor is joined to others there, as the weights of experts are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    wanted = model.state_dict()

    def name_of(key: str) -> tuple[str, bool]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        return name, pattern is not None

    return name_of
