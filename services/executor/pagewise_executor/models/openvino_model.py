"""Converts a model of transformers to OpenVINO, with paged attention over memory that is ours.

The model is traced by OpenVINO's own frontend. In the trace each attention layer is one operation, which becomes
OpenVINO's PagedAttention: its block tables and lengths are inputs of the model, and so are K and V of each layer, for
which the engine passes the KV pool.
"""

import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import torch
import torch.nn.functional as F
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from openvino.op import _PagedAttentionExtension
from torch import nn
from transformers import PreTrainedModel

from pagewise_executor.models.openvino_choice import BLOCK_SIZE, NotConvertibleError
from pagewise_executor.models.openvino_int8 import quantise_weights
from pagewise_executor.models.openvino_merge import merge_products

log = logging.getLogger(__name__)

_OPERATION = "pagewise::paged_attention"
_TOLERANCE = 1e-2
"""By how much of their range the logits of the two models may differ. Rounding makes about a thousandth of that."""
_TOLERANCE_OF_EIGHT_BITS = 1e-1
"""With weights in eight bits up to 0.034 were seen, with models of the tests, which are narrow."""
_SAMPLE = BLOCK_SIZE + 9
"""Tokens for which the logits are compared."""
_STEP_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


def compile_model(
    model: nn.Module,
    attention: list[nn.Module],
    shapes: list[tuple[int, int]],
    vocab_size: int,
    threads: Sequence[int],
    *,
    eight_bits: bool = False,
) -> dict[int, ov.CompiledModel]:
    """Convert a model, compile it for the CPU, and compare its logits with those of the model.

    Each of the numbers of ``threads`` needs a compiled model of its own, with the weights as they are computed with.

    ``attention``: the attention modules in layer order. ``shapes``: (kv_heads, head_dim) of each.
    ``eight_bits``: of the weights of linear layers. The inputs of the results are those that ``OpenVINOEngine`` passes;
    their output is logits [kept, vocab].

    Raises:
        NotConvertibleError: OpenVINO has no form of an operation, or what it computes is something else.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.loss_function = None  # the tracer reads all properties, and this one warns if nobody has set it
    layers = [_AttentionLayer(number) for number in range(len(attention))]
    for module, layer in zip(attention, layers, strict=True):
        module.paged_layer = layer
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # the tracer's, of values that become constants, as they should
            flat = _FlatModel(model)
            ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, _SAMPLE))
            expected = flat(ids, torch.arange(_SAMPLE), torch.arange(_SAMPLE)).numpy()  # first: _convert alters layers
            began = time.perf_counter()
            converted = _convert(flat, layers, shapes)
            num_merged = merge_products(converted)
            if eight_bits:
                log.info("%d linear layers with weights in eight bits", num_merged + quantise_weights(converted))
            traced = time.perf_counter()
            compiled = {count: ov.Core().compile_model(converted, "CPU", _options(count)) for count in threads}
            compiled_at = time.perf_counter()
            tolerance = _TOLERANCE_OF_EIGHT_BITS if eight_bits else _TOLERANCE
            for each in compiled.values():
                _compare(each, ids.numpy(), expected, shapes, tolerance)
    except NotConvertibleError:
        raise
    except Exception as error:  # OpenVINO's errors have no class in common
        raise NotConvertibleError(_reason(error)) from error
    finally:
        for module in attention:
            del module.paged_layer
    log.info("converted for OpenVINO in %.1f s, compiled in %.1f s", traced - began, compiled_at - traced)
    return compiled


class _FlatModel(nn.Module):
    """The model on a flat batch: logits [kept, vocab] of ids and positions [tokens].

    The tokens are a batch of sequences of one token each. Moving a dimension of one elsewhere moves nothing in memory;
    in one sequence of all tokens, each layer would transpose Q, K and V.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        # Only what is kept gets to the last layer. ``logits_to_keep`` would choose within each sequence.
        head = self.model.get_output_embeddings()
        choice = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][kept],))
        try:
            output = self.model(input_ids=input_ids[:, None], position_ids=position_ids[:, None], use_cache=False)
        finally:
            choice.remove()
        logits: torch.Tensor = output.logits[:, 0]
        return logits


class _AttentionLayer(nn.Module):
    """Takes the place of a ``PagedLayer`` while a model is traced, and notes how the layer attends.

    It is a module, because OpenVINO's frontend replaces modules. By itself it computes causal attention of the flat
    batch as one sequence, with which the result of the conversion is compared.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.scale, self.window = number, 0, 0.0, 0
        self.softcap: float | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See ``PagedLayer.attend``."""
        self.heads, self.kv_heads = int(q.shape[1]), int(k.shape[1])
        self.scale, self.window, self.softcap = float(scale), int(window or 0), softcap
        attended: torch.Tensor = self(q.flatten(1), k.flatten(1), v.flatten(1))
        return attended.reshape(-1, self.heads, int(v.shape[2]))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            x.view(len(x), heads, -1).transpose(0, 1)
            for x, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        keys, values = (x.repeat_interleave(self.heads // self.kv_heads, dim=0) for x in (keys, values))
        positions = torch.arange(len(q))
        mask = positions <= positions[:, None]
        if self.window:
            mask &= positions > positions[:, None] - self.window
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        return attended.transpose(0, 1).flatten(1)


def _convert(model: _FlatModel, layers: list[_AttentionLayer], shapes: list[tuple[int, int]]) -> ov.Model:
    """Return the model as OpenVINO's, with paged attention in its layers."""

    def stand_in(context: Any) -> list[Any]:
        # A model may not have inputs while it is converted that the trace has not. So each layer is first something
        # without such inputs that also takes Q, K and V and has a result of the right shape.
        number = int(context.get_values_from_const_input(3))
        width = layers[number].heads * shapes[number][1]
        joined = ops.concat([context.get_input(index) for index in range(3)], 1)
        split = ops.variadic_split(joined, 1, np.array([width, -1]))
        split.set_friendly_name(f"{_OPERATION}.{number}")
        return [split.output(0)]

    frontend = FrontEndManager().load_by_framework("pytorch")
    frontend.add_extension(ConversionExtension(_OPERATION, stand_in))
    # Not by openvino.convert_model: it traces everything twice, and reports to its makers that it was used.
    decoder = TorchScriptPythonDecoder(
        model,
        example_input={
            "input_ids": torch.arange(5),
            "position_ids": torch.arange(5),
            "kept": torch.tensor([1, 4]),
        },
        module_extensions={_AttentionLayer: _replacement()},
        trace_kwargs={"check_trace": False},
    )
    converted = frontend.convert(frontend.load(decoder))
    if any(layer.softcap for layer in layers):
        raise NotConvertibleError("its attention has a softcap")
    _page(converted, layers, shapes)
    return converted


def _page(model: ov.Model, layers: list[_AttentionLayer], shapes: list[tuple[int, int]]) -> None:
    """Put paged attention in the place of what stands for it, and give the model the inputs that this has."""
    named = {node.get_friendly_name(): node for node in model.get_ops()}
    inputs = [_parameter(name, [] if name == "max_context_len" else [-1]) for name in _STEP_INPUTS]
    step = [each.output(0) for each in inputs]
    for layer, (heads, dim) in zip(layers, shapes, strict=True):
        split = named.get(f"{_OPERATION}.{layer.number}")
        if split is None:
            raise NotConvertibleError(f"attention layer {layer.number} is not in its trace")
        qkv = split.input_value(0).get_node().input_values()
        pool = [
            _parameter(f"{part}.{layer.number}", [-1, heads, BLOCK_SIZE, dim], ov.Type.f32)
            for part in ("keys", "values")
        ]
        attended = _paged_attention(layer, (heads, dim), [*qkv, *(each.output(0) for each in pool)], step)
        split.output(0).replace(attended)
        inputs += pool
    model.add_parameters(inputs)
    model.validate_nodes_and_infer_types()


def _replacement() -> ModuleExtension:
    """Say that the frontend is to see one operation in place of an attention layer."""
    return ModuleExtension(
        _AttentionLayer,
        _OPERATION,
        convert=lambda layer, operation, q, k, v: operation(q, k, v, torch.tensor(layer.number)),
        # What the trace computes with: only the shape matters.
        evaluate=lambda layer, q, k, v, number: q.new_zeros(len(q), v.shape[1] // layer.kv_heads * layer.heads),
    )


def _paged_attention(layer: _AttentionLayer, shape: tuple[int, int], qkv: list[Any], step: list[Any]) -> Any:
    """Return the output of OpenVINO's PagedAttention: [tokens, heads * head_dim].

    ``qkv``: queries, keys and values [tokens, heads * head_dim], and the layer's K and V in the pool. Its other inputs
    are for what is not used here, and empty: scores, rotated blocks, sparse attention, sinks, eviction, trees of
    drafts.
    """
    past_lens, subsequence_begins, block_indices, block_indices_begins, max_context_len = step
    node = _PagedAttentionExtension(
        [
            *qkv,
            past_lens,
            subsequence_begins,
            block_indices,
            block_indices_begins,
            _constant(layer.scale, np.float32),
            _constant(layer.window, np.int32),
            _empty(np.float32),  # ALiBi
            max_context_len,
            _empty(np.int32),  # the window of scores
            _empty(np.int32),  # rotated blocks, by how much, and the table of angles
            _empty(np.int32, 2),
            _empty(np.float32, 2),
            _empty(np.float32),  # sparse attention: its threshold, block size and stride
            _constant(0, np.int32),
            _constant(0, np.int32),
            _empty(np.float32),  # sinks
            _constant(0, np.int32),  # eviction: where it starts, sizes, and two lists of blocks
            _empty(np.int32),
            _empty(np.int32),
            _empty(np.int32),
            _empty(np.int32),  # types of tokens
            _empty(np.uint8),  # trees of drafts
            _empty(np.int32),
        ]
    )
    info = node.get_rt_info()
    for name in ("k", "v"):
        info[f"num_{name}_heads"], info[f"{name}_head_size"] = shape
    return node.output(0)


def _parameter(name: str, shape: list[int], dtype: ov.Type = ov.Type.i32) -> Any:
    node = ops.parameter(shape, dtype, name=name)
    node.output(0).set_names({name})
    return node


def _constant(value: float, dtype: type) -> Any:
    return ops.constant(np.array(value, dtype)).output(0)


def _empty(dtype: type, rank: int = 1) -> Any:
    return ops.constant(np.zeros([0] * rank, dtype)).output(0)


def _options(threads: int) -> dict[str, Any]:
    return {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",  # eight bits otherwise, which changes tokens
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # Threads that are pinned to cores share them with other executors, however many others are free.
        "ENABLE_CPU_PINNING": False,
    }


def _compare(
    compiled: ov.CompiledModel, ids: Any, expected: Any, shapes: list[tuple[int, int]], tolerance: float
) -> None:
    """Compute a sequence of two blocks, the second one before the first in memory.

    ``ids`` [tokens], and the logits that are ``expected`` [tokens, vocab]. ``tolerance``: of their range.

    Raises:
        NotConvertibleError: the logits are others.
    """
    size = len(ids)
    positions = np.arange(size)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "kept": positions}
    step = ([0], [0, size], [1, 0], [0, 2], size)
    inputs |= {name: np.array(values, np.int32) for name, values in zip(_STEP_INPUTS, step, strict=True)}
    for layer, (heads, dim) in enumerate(shapes):
        for part in ("keys", "values"):
            inputs[f"{part}.{layer}"] = np.zeros((2, heads, BLOCK_SIZE, dim), np.float32)
    logits = compiled.create_infer_request().infer(inputs)[0]
    difference = float(np.abs(logits - expected).max() / max(1e-6, np.ptp(expected)))
    if not difference <= tolerance:
        raise NotConvertibleError(f"its logits differ from those of torch by {difference:.2g} of their range")


def _reason(error: Exception) -> str:
    """Return the line of a message of OpenVINO that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "No conversion rule found" in line]
    return (telling or lines or [type(error).__name__])[0]
