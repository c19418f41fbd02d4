"""How much each input of a linear layer matters, measured by a text (``--quantization-text``).

An error of a weight changes the output of its layer by as much as the input of that weight is large. So the mean squares
of inputs say which weights have to be rounded with care. The model computes the text once, in float32. Each decoder layer
is quantised as soon as it has computed, and where layers are read one by one, the next one is read after that. So the
memory is that of loading without a text, and of the hidden states of the text.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from torch import nn

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.torch_attention import attend_chunk
from pagewise_executor.models.cpu_mixtures import find_experts
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.operations import Operations
from pagewise_executor.models.packed_linear import is_quantised

log = logging.getLogger(__name__)

PIECE, MOST_PIECES = 512, 16
"""Tokens of a piece of the text, and the pieces that are computed."""

Importance = Mapping[nn.Module, Sequence[torch.Tensor]]
"""The sums of the squares of the inputs, by module: of a linear layer [ins], of experts [experts, hidden] for gate and up
and [experts, inner] for down."""


class CalibrationText(NamedTuple):
    """A text as tokens: int64 [pieces, tokens], each piece a sequence of its own. ``name``: a hash of them."""

    ids: torch.Tensor
    name: str


def read_text(config: ExecutorConfig, path: Path, max_model_len: int) -> CalibrationText | None:
    """Return the text that the option names as tokens of the model in the folder ``path``; None: it names none.

    Raises:
        ModelError: the file or the model's tokenizer cannot be read, or the text is too short.
    """
    if config.quantization_text is None:
        return None
    from tokenizers import Tokenizer

    asked = f"--quantization-text {config.quantization_text}"
    try:
        text = Path(config.quantization_text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{asked} cannot be read as text: {error}") from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ModelError(f"{asked}: tokenizer.json of {config.model} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    first: list[int] = tokenizer.encode("").ids  # what stands before every text
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    size = min(PIECE, max_model_len) - len(first)
    pieces = [first + ids[start : start + size] for start in range(0, min(len(ids), size * MOST_PIECES), size)]
    whole = torch.tensor([piece for piece in pieces if len(piece) == size + len(first)])
    if not len(whole):
        raise ModelError(f"{asked} has {len(ids)} tokens of {config.model}, and has to have {size} or more")
    log.info("%s: %d tokens are computed in float32, of %d", asked, whole.numel(), len(ids))
    return CalibrationText(whole, hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:8])


def compute_text(
    model: Any,
    text: CalibrationText,
    layers: Sequence[str],
    ahead: int,
    attention: Mapping[nn.Module, AttentionShape],
    load: Callable[[str], None],
    replace: Callable[[str, Importance], None],
) -> None:
    """Compute the text by a model whose decoder layers are loaded before, and replaced after they have computed.

    ``layers``: their names, in order. ``ahead``: how many have been loaded. ``attention``: the attention modules.
    ``replace``: gets the importance of the inputs of a layer, which it has from the text.
    """
    waiting, watched = iter(layers), dict[str, _Watched]()

    def enter(part: str) -> None:
        layer = watched[part] = _Watched(model.get_submodule(part))

        def leave(*_: object) -> None:
            hook.remove()
            del watched[part]
            replace(part, layer.close())
            for following in islice(waiting, 1):
                load(following)
                enter(following)

        hook = layer.module.register_forward_hook(leave)

    for part in islice(waiting, ahead):
        enter(part)
    with torch.no_grad(), _plain_attention(attention, text.ids.shape[1]):
        positions = torch.arange(text.ids.shape[1]).repeat(len(text.ids))[None]
        model.get_decoder()(input_ids=text.ids.view(1, -1), position_ids=positions, use_cache=False)
    if watched:
        log.warning("%d parts of the model take no part in its computation, and are quantised without", len(watched))


class _Watched:
    """A decoder layer that adds up the squares of the inputs of its linear layers and experts while it computes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._squares: dict[nn.Module, list[torch.Tensor]] = {}
        self._hooks = [
            each.register_forward_pre_hook(self._add_experts if _has_experts(each) else self._add)
            for each in module.modules()
            if is_quantised(each) or _has_experts(each)
        ]
        # The operations in C need a step of the executor.
        self._fused = {each: each.operations for each in module.modules() if isinstance(each, FusedDecoderLayer)}
        for layer in self._fused:
            layer.operations = Operations()

    def _add(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        found = _squares(args[0])
        self._squares[module] = [found + other for other in self._squares.get(module, [torch.zeros_like(found)])]

    def _add_experts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._hooks = [hook for hook in self._hooks]
