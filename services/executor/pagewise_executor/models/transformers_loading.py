"""Loads a model by transformers, or one rank's part of it, for which only that part of the weight files is read.

transformers is imported by the functions, because that takes seconds and many models do not need it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.progress import logged_bar

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.aliases import config_of_alias
from pagewise_executor.models.attention_temperature import fix_temperature
from pagewise_executor.models.config_checks import check_file
from pagewise_executor.models.keys_of_values import store_once
from pagewise_executor.models.latents import absorb_latents, register_mistral4
from pagewise_executor.models.long_rope import FixedRope, fix_rope
from pagewise_executor.models.mtp import MtpNames, is_of_mtp
from pagewise_executor.models.mxfp4 import joined
from pagewise_executor.models.recurrent import RecurrentLayer
from pagewise_executor.models.recurrent_shards import narrow_convolutions, narrowed
from pagewise_executor.models.shard_plans import division_plan
from pagewise_executor.models.shards import Shards, Slice, UnknownShardError, vocabulary_names
from pagewise_executor.models.support import SERVED, check_known
from pagewise_executor.models.text_part import is_text_part, text_name, text_part
from pagewise_executor.models.trial import try_without_weights
from pagewise_executor.models.weight_files import Headers, first_line, named, open_weights
from pagewise_executor.models.weight_report import (
    Differences,
    Mismatch,
    check_differences,
    check_experts,
    check_types,
    check_values,
    differences_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


def transformers_config(config: ExecutorConfig, path: Path) -> "PretrainedConfig":
    """Return the content of config.json; of a multimodal model, the part for its causal LM.

    Raises:
        ModelError: it cannot be used.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_file(config.model, path)
    try:
        if not config.trust_remote_code and (alias := config_of_alias(config.model, path)) is not None:
            return alias
        check_known(config.model, path)
        found: PretrainedConfig = AutoConfig.from_pretrained(  # nosec B615 # a directory, pinned by --revision when it was downloaded
            path, trust_remote_code=config.trust_remote_code
        )
    except ModelError:
        raise
    except Exception as error:  # configurations check their own values, and raise plain exceptions of many kinds
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
        why = named(error) if cause is None else first_line(cause)
        raise ModelError(f"{config.model}: config.json is unusable: {why}") from error
    text: Any = found.get_text_config(decoder=True)
    if isinstance(text, dict):
        raise ModelError(f"{config.model}: config.json is unusable: a {found.model_type} model has no text_config")
    if text.model_type == "mistral4":
        register_mistral4()
    return text_part(config.model, found)


def load_with_transformers(
    config: ExecutorConfig,
    path: Path,
    headers: Headers,
    whole: "PretrainedConfig",
    part: "PretrainedConfig",
    dtype: torch.dtype,
    ranks: Ranks,
    device: torch.device,
    max_model_len: int,
    recurrent: list[RecurrentLayer],
    mtp: MtpNames | None,
) -> tuple[torch.nn.Module, Shards | None, FixedRope, list[RecurrentLayer]]:
    """Return the model, or this rank's part of it, its division, the result of ``fix_rope``, and its recurrent layers.

    ``whole``, ``part``: the configurations of the whole model, and of this rank's part. ``recurrent``: the recurrent
    layers of the whole model. ``mtp``: the names of an MTP layer, which is the last one of the model then.

    Raises:
        ModelError: the files lack weights of the model, or have them in another shape, or some are not finite.
        UnknownShardError: the model has no plan, or the plan does not divide a weight.
    """
    from transformers import AutoModelForCausalLM

    from pagewise_executor.attention.paged import NAME

    for file in headers:
        with open_weights(file):
            pass  # the error names the file if it is damaged
    check_types(config.model, headers)
    check_experts(config.model, headers)
    model: torch.nn.Module
    shards: Shards | None = None
    named: Callable[[str], str | None] = text_name if is_text_part(path, part) else str
    named = named if mtp is None else mtp.named(named)
    with _bars_in_the_log(config.model), ExitStack() as stack:
        if ranks.alone and named is not str:
            model, differences = _load_named(part, headers, dtype, stack, named)
        elif ranks.alone:
            loaded: Any = AutoModelForCausalLM.from_pretrained(  # nosec B615 # a directory too
                path, config=part, dtype=dtype, attn_implementation=NAME, use_safetensors=True,
                trust_remote_code=config.trust_remote_code, output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported with the others
            )  # fmt: skip
            model, differences = loaded[0], differences_of(loaded[1])
        else:
            model, shards, differences, recurrent = _load_part(config, whole, part, headers, dtype, ranks, named)
    check_differences(config.model, headers, differences)
    if mtp is not None:
        mtp.add(config.model, model, headers, dtype)
    model.eval().requires_grad_(False).to(device)
    rope = fix_rope(model, max_model_len)
    fix_temperature(config.model, model)
    check_values(config.model, dict(model.named_parameters()), headers)
    absorb_latents(model)
    if config.kv_dtype == "auto":
        store_once(model)
    return model, shards, rope, recurrent


def _load_named(
    part: "PretrainedConfig",
    headers: Headers,
    dtype: torch.dtype,
    stack: ExitStack,
    named: Callable[[str], str | None],
) -> tuple[torch.nn.Module, Differences]:
    """Return the causal LM of a checkpoint whose tensors have other names, and the differences.

    ``stack`` closes the files. ``named``: as of ``_load_part``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from pagewise_executor.attention.paged import NAME

    opened = [stack.enter_context(open_weights(file)) for file in headers]
    weights = {
        name: file.get_slice(key)
        for file in opened
        for key in file.keys()  # noqa: SIM118 - it is no dict
        if (name := named(key)) is not None and not is_of_mtp(name)
    }
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(part)]
    loaded = kind.from_pretrained(
        None,
        config=part,
        state_dict=weights,
        dtype=dtype,
        attn_implementation=NAME,
        ignore_mismatched_sizes=True,  # they are reported with the others
        output_loading_info=True,
    )
    return loaded[0], differences_of(loaded[1])


class _LazyPart:
    """A weight of the checkpoint in the state dict of transformers, which reads ``[...]`` of it when it needs it."""

    def __init__(self, source: Slice, shards: Shards, name: str, shape: list[int]) -> None:
        self._source, self._shards, self._name, self._shape = source, shards, name, shape

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._shards.read(self._source, self._name, self._shape)


def _load_part(
    config: ExecutorConfig,
    whole: Any,
    part: Any,
    headers: Headers,
    dtype: torch.dtype,
    ranks: Ranks,
    named: Callable[[str], str | None],
) -> tuple[torch.nn.Module, Shards, Differences, list[RecurrentLayer]]:
    """Return a rank's part of a model, in host memory, its division, the differences between its files and it, and its
    recurrent layers.

    ``named``: returns the name that a tensor of the files has in a checkpoint of this model alone; None: it has none.
    """
    from pagewise_executor.attention.paged import NAME

    mxfp4 = (getattr(part, "quantization_config", None) or {}).get("quant_method") == "mxfp4"
    complete, empty = _skeletons(config, whole, part, dtype)
    kind = narrowed(type(empty), ranks.size) if narrow_convolutions(empty, ranks.size) else type(empty)
    vocabulary = vocabulary_names(complete)
    shards = Shards(ranks, division_plan(complete, vocabulary), vocabulary)
    recurrent = _try_part(config, part, dtype, ranks)
    name_of = _names(empty)
    wanted, sizes = (
        {name: list(weight.shape) for name, weight in model.state_dict().items()} for model in (empty, complete)
    )
    mismatched: list[Mismatch] = []
    weights: dict[str, Any] = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(open_weights(file)) for file in headers]
        tensors = {key: file.get_slice(key) for file in opened for key in file.keys()}  # noqa: SIM118 - it is no dict
        for key, tensor in (joined(tensors, dtype) if mxfp4 else tensors).items():
            if (alone := named(key)) is None:
                continue
            name, one_of_several = name_of(alone)
            found = list(tensor.get_shape())
            if name in sizes.keys() - wanted.keys():
                raise UnknownShardError(f"--tensor-parallel: nothing says how its weight {name} is divided")
            # A part of a weight that is too large may have the right size. The shapes of weights that are joined to
            # others are compared after the join.
            if not one_of_several and found != sizes.get(name, found):
                mismatched.append(Mismatch(key, found, sizes[name]))
            # transformers reports weights that the model does not have.
            weights[alone] = _LazyPart(tensor, shards, name, wanted.get(name, found))
        if mismatched:
            return empty, shards, Differences(mismatched=mismatched), recurrent
        model, info = kind.from_pretrained(
            None,
            config=part,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=NAME,
            ignore_mismatched_sizes=True,  # they are reported with the others
            output_loading_info=True,
        )
    return model, shards, differences_of(info), recurrent


def _skeletons(config: ExecutorConfig, whole: Any, part: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the whole model and a rank's part of it, without weights."""
    from transformers import AutoModelForCausalLM

    from pagewise_executor.attention.paged import NAME

    made = []
    for each in (whole, part):
        each.quantization_config = None  # ``mxfp4.joined`` reads these weights, and transformers does not
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                each, attn_implementation=NAME, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        made.append(model)
    return made[0], made[1]


def _try_part(config: ExecutorConfig, part: Any, dtype: torch.dtype, ranks: Ranks) -> list[RecurrentLayer]:
    """Try a rank's part of a model without weights; return its recurrent layers.

    Raises:
        UnknownShardError: it cannot be computed, or its attention differs from its configuration.
    """
    try:
        trust = config.trust_remote_code
        return try_without_weights(config.model, part, dtype, trust_remote_code=trust, ranks=ranks.size).recurrent
    except ModelError as error:
        why = "its modules do not fit together with a part of its heads"
        if error.__cause__ is None:  # it could be computed
            why = f"a rank's part of {str(error).removesuffix(f'; {SERVED}')}"
        raise UnknownShardError(f"--tensor-parallel {ranks.size}: {why}") from error


@contextmanager
def _bars_in_the_log(model: str) -> Iterator[None]:
    """Turn the progress bars of transformers into lines of the log.

    Its table of missing and unused weights is left out: ``check_differences`` reports them in a line.
    """
    from transformers.utils.logging import set_tqdm_hook

    def is_no_table(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg) or "CONVERSION" in str(record.msg)

    bar = logged_bar(log, f"loading {model}", counts="it", unit="weights")
    previous = set_tqdm_hook(lambda _, arguments, options: bar(*arguments, **options))
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_no_table)
    try:
        yield
    finally:
        logger.removeFilter(is_no_table)
        set_tqdm_hook(previous)


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
