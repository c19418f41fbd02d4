"""Rounds the weights of linear layers by the inputs that a text gives them (``--quantization-text``).

The larger an input is, the more an error of its weight changes the output, and errors of weights whose inputs go
together may cancel. So the text is computed once, in float32, and each decoder layer is quantised by
``balanced_rounding`` as soon as it has computed. Where layers are read one by one, the next one is read after that:
then loading takes the memory that it takes without a text, and that of the hidden states of the text and of the
products of the inputs of one layer.
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
from pagewise_executor.attention.torch_attention import LayerOfPieces
from pagewise_executor.models.balanced_rounding import add_products, quantise_balanced
from pagewise_executor.models.cpu_mixtures import find_experts, is_experts
from pagewise_executor.models.four_bit_weight import FourBitWeight, quantise
from pagewise_executor.models.fused import FusedDecoder, FusedDecoderLayer
from pagewise_executor.models.operations import Operations
from pagewise_executor.models.packed_linear import is_quantised

log = logging.getLogger(__name__)

_PIECE, _MOST_PIECES = 512, 16
"""Tokens of a piece of the text, which is a sequence of its own, and the pieces that are computed."""


def read_text(config: ExecutorConfig, path: Path, max_model_len: int) -> torch.Tensor | None:
    """Return the text that the option names as tokens int64 [pieces, tokens] of the model in the folder ``path``.

    None: the option is not given.

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
        raise ModelError(f"{asked} cannot be read as text in UTF-8: {error}") from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ModelError(f"{asked}: tokenizer.json of {config.model} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    first: list[int] = tokenizer.encode("").ids  # tokens that stand before each text
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    size = min(_PIECE, max_model_len) - len(first)
    starts = range(0, min(len(ids) - size + 1, size * _MOST_PIECES), size)
    if not starts:
        raise ModelError(f"{asked} has {len(ids)} tokens of {config.model}, and {size} are needed, better {8 * size}")
    return torch.tensor([first + ids[start : start + size] for start in starts])


class Calibration:
    """Rounds weights by the inputs of their layers, which a text gives them.

    ``text``: of ``read_text``. ``attention``: the attention modules of the model, and their shapes.
    """

    def __init__(self, text: torch.Tensor, attention: Mapping[nn.Module, AttentionShape]) -> None:
        self._text, self._attention = text, attention
        self._watched: dict[str, _Watched] = {}
        self._current: _Watched | None = None
        self._digest = hashlib.sha256()

    @property
    def name(self) -> str:
        """A hash of the weights so far. The products of other processors differ in the last bits, and so may codes."""
        return self._digest.hexdigest()[:8]

    def compute(
        self, model: Any, layers: Sequence[str], ahead: int, load: Callable[[str], None], done: Callable[[str], None]
    ) -> None:
        """Compute the text. ``layers``: the names of the decoder layers of ``model``, of which ``ahead`` are loaded.

        ``load``: loads a layer before it computes. ``done``: replaces one that has computed, and is quantised by
        ``quantise`` of this object.
        """
        waiting = iter(layers)

        def enter(part: str) -> None:
            watched = self._watched[part] = _Watched(model.get_submodule(part))

            def leave(*_: object) -> None:
                hook.remove()
                self._finish(part, done)
                for following in islice(waiting, 1):
                    load(following)
                    enter(following)

            hook = watched.layer.register_forward_hook(leave)

        for part in islice(waiting, ahead):
            enter(part)
        positions = torch.arange(self._text.shape[1]).repeat(len(self._text))
        decoder = model.get_decoder()
        with torch.no_grad(), self._plain_attention(), _by_module(decoder):
            decoder(input_ids=self._text.view(1, -1), position_ids=positions[None], use_cache=False)
        for part in list(self._watched):  # lists of modules that are no layers
            self._finish(part, done)

    def _finish(self, part: str, done: Callable[[str], None]) -> None:
        self._current = self._watched.pop(part)
        self._current.close()
        done(part)
        self._current = None

    def quantise(self, module: nn.Module, weight: torch.Tensor, *of_expert: int) -> tuple[FourBitWeight, float]:
        """Quantise a weight; see ``Rounding``."""
        assert self._current is not None
        products = self._current.products(module, *of_expert)
        made, error = quantise_balanced(weight, products) if products else quantise(weight)
        for part in (made.codes, made.scales):
            self._digest.update(part.numpy().data)
        return made, error

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
        """Let tokens attend to the tokens of their own piece of the text."""
        for module, shape in self._attention.items():
            scale_queries = getattr(module, "scale_queries", None)
            module.paged_layer = LayerOfPieces(self._text.shape[1], shape, scale_queries)  # type: ignore[assignment]
        try:
            yield
        finally:
            for module in self._attention:
                del module.paged_layer


@contextmanager
def _by_module(decoder: nn.Module) -> Iterator[None]:
    """Let a decoder call its layers as modules: their hooks load the layers behind them."""
    if not isinstance(decoder, FusedDecoder):
        yield
        return
    decoder.call_by_module(lambda layer: True)
    try:
        yield
    finally:
        decoder.call_by_module()


class _Watched:
    """Keeps the inputs of the linear layers and experts of a decoder layer while it computes."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._products: dict[nn.Module, list[torch.Tensor]] = {}
        self._of_experts: dict[nn.Module, _ExpertInputs] = {}
        self._hooks = {
            module: module.register_forward_pre_hook(self._keep_tokens if is_experts(module) else self._add)
            for module in layer.modules()
            if is_quantised(module) or is_experts(module)
        }
        # The operations in C need a step of the executor.
        self._fused = {module: module.operations for module in layer.modules() if isinstance(module, FusedDecoderLayer)}
        for module in self._fused:
            module.operations = Operations()

    def _add(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._products[module] = add_products(args[0].flatten(0, -2), self._products.get(module))

    def _keep_tokens(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._hooks.pop(module).remove()  # ``find_experts`` calls the module
        if (found := find_experts(module)) is not None:
            self._of_experts[module] = _ExpertInputs(args[0].flatten(0, -2).clone(), args[1], *found)

    def close(self) -> None:
        """Let the layer compute as before."""
        for hook in self._hooks.values():
            hook.remove()
        for module, operations in self._fused.items():
            module.operations = operations

    def products(self, module: nn.Module, *of_expert: int) -> list[torch.Tensor] | None:
        """Return the products of the inputs of a weight of ``module``; None: it had none."""
        if of_expert and module in self._of_experts:
            return self._of_experts[module].products(*of_expert)
        return self._products.pop(module, None)


class _ExpertInputs(NamedTuple):
    """The tokens x [tokens, hidden] of a mixture, the experts that they chose [tokens, k], and the result of
    ``find_experts``."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: list[torch.Tensor]
    activation: Any

    def products(self, half: int, expert: int) -> list[torch.Tensor] | None:
        """Return the products of the inputs of gate and up (``half`` 0) or of down (1); None: no token chose it."""
        rows = self.x[(self.chosen == expert).any(dim=1)]
        if not len(rows):
            return None
        if half:
            gate_up, bias = self.weights[0][expert], self.weights[2][expert] if len(self.weights) > 2 else None
            rows = self.activation.of(F.linear(rows, gate_up, bias))
        return add_products(rows)
