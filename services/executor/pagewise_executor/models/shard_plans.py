"""How the weights of a model of transformers are divided among ranks.

transformers has a plan for most of its models, which leaves out attention or shared experts in some, and gathers the
outputs of attention's projections in others, whose norms cover all heads. The structure of the modules takes precedence
over it. A rank's part of the model is computed without weights first (``loader``), which finds parts that do not fit
together.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from pagewise_executor.models.latents import latent_plan
from pagewise_executor.models.recurrent_shards import recurrent_styles
from pagewise_executor.models.shards import (
    COLUMNS,
    EXPERTS,
    FIRST,
    NORM,
    PACKED,
    PACKED_ROWS,
    ROWS,
    Style,
    UnknownShardError,
    VocabularyNames,
)

_PROJECTIONS = {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS}
_OUTPUTS = ("o_proj", "dense", "out_proj")
_MLPS = (
    {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
    {"up_proj": COLUMNS, "down_proj": ROWS},
    {"w1": COLUMNS, "w3": COLUMNS, "w2": ROWS},
    {"input_linear": PACKED, "output_linear": ROWS},
)
_PACKED_MLP = {"gate_up_proj": PACKED, "down_proj": ROWS}
_GATHERED = "colwise_gather_output"


def division_plan(model: Any, vocabulary: VocabularyNames) -> dict[str, Style]:
    """Return the plan of a model: names of modules or weights, * for each number, to styles of ``Shards``.

    ``model``: the whole model, on any device. ``vocabulary``: the names of its embedding and head.

    Raises:
        UnknownShardError: it has no plan, or an unknown style.
    """
    known: dict[str, str] = model.tp_plan
    plan: dict[str, Style] = {**known, **latent_plan(model)}
    for name, module in model.named_modules():
        prefix = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        plan |= {f"{prefix}.{part}" if part else prefix: style for part, style in _styles(module, prefix, known)}
    if not plan.keys() - set(vocabulary):
        raise UnknownShardError(
            f"--tensor-parallel: transformers says for no layer of {type(model).__name__} how it can be divided"
        )
    styles = {name.rpartition(".")[2]: style for name, style in plan.items()}
    if not latent_plan(model) and not styles.items() >= _PROJECTIONS.items():
        # Otherwise Q, K and V lie in one weight, in an order that cutting it does not keep.
        raise UnknownShardError(
            f"--tensor-parallel: attention of {type(model).__name__} has no projections that can be divided by heads"
        )
    return plan


def _styles(module: Any, name: str, known: dict[str, str]) -> Iterator[tuple[str, Style]]:
    """Yield the styles of the parts of a module that follow from its structure; an empty name: of the module itself.

    ``name``: of the module in the plan ``known`` of transformers.
    """
    # Where ``out_proj`` has no norms beside it, heads are computed from the size of the hidden state, which stays.
    outputs = _OUTPUTS if hasattr(module, "q_layernorm") else _OUTPUTS[:2]
    output = next((one for one in outputs if _has_linears(module, one)), None)
    if recurrent := dict(recurrent_styles(module)):
        yield from recurrent.items()
    elif output is not None and _has_linears(module, *_PROJECTIONS):
        yield from _PROJECTIONS.items()
        yield output, ROWS
        yield "sinks", COLUMNS
        yield from (("gate_proj", COLUMNS), ("g_proj", COLUMNS))
        for norm, projection in (("q_norm", module.q_proj), ("k_norm", module.k_proj)):
            weight = getattr(getattr(module, norm, None), "weight", None)
            # Others go over each head. Over the only head, both are the same.
            if weight is not None and weight.shape == (projection.out_features,) != (module.head_dim,):
                yield norm, NORM
    elif mlp := next((one for one in _MLPS if _has_linears(module, *one)), None):
        yield from mlp.items()
    elif known.get(f"{name}.gate_up_proj") == _GATHERED and _has_linears(module, *_PACKED_MLP):
        yield from _PACKED_MLP.items()
    elif name not in known and hasattr(module, "is_transposed") and hasattr(module, "gate_up_proj"):
        yield "", EXPERTS
        yield from _expert_styles(transposed=module.is_transposed, concatenated=module.is_concatenated)


def _has_linears(module: Any, *names: str) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _expert_styles(*, transposed: bool, concatenated: bool) -> Iterator[tuple[str, str]]:
    """Yield the styles of the weights of experts.

    ``transposed``: they are [experts, inputs, outputs], and not [experts, outputs, inputs]. ``concatenated``: the
    gate's outputs come before the others, instead of in turn with them.
    """
    last = PACKED_ROWS if concatenated else ROWS
    yield "gate_up_proj", last if transposed else PACKED if concatenated else COLUMNS
    yield "gate_up_proj_bias", last
    yield "down_proj", COLUMNS if transposed else ROWS
    yield "down_proj_bias", FIRST
