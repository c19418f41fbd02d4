"""``pagewise size``: the GPU memory of a model, and the number of tokens beside it, from its config.json alone.

The bytes of weights and of KV come from the functions that the loader and the pool use, and so do the sizes of graphs.
The memory of a step is an estimate; an executor measures it when it starts. docs/sizing.md compares it with a GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig, build_config, parse_size
from pagewise_shared.errors import PagewiseError
from pagewise_shared.model_files import resolve_model

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.device_tables import table_shapes
from pagewise_executor.attention.registry import KV_TYPES
from pagewise_executor.cuda_graphs import decode_graphs, mixed_graphs
from pagewise_executor.cuda_graphs.graphed_steps import sizes_up_to
from pagewise_executor.device_defaults import Gpu, with_step_limits
from pagewise_executor.graph_capture import BYTES_PER_LAYER
from pagewise_executor.group_choice import layout_of_layers
from pagewise_executor.kv.kv_pool import bytes_per_block
from pagewise_executor.kv.layer_groups import PageLayout, single_group
from pagewise_executor.models.families import check_quantised
from pagewise_executor.models.keys_of_values import store_once
from pagewise_executor.models.latents import check_latents
from pagewise_executor.models.mxfp4_experts import place_mxfp4
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint, read_quantisation
from pagewise_executor.models.shard_settings import shard_config
from pagewise_executor.models.support import attention_modules, attention_shape, check_supported, kv_sources
from pagewise_executor.models.transformers_loading import transformers_config
from pagewise_executor.models.trial import try_without_weights
from pagewise_executor.models.weight_files import checked_headers, weight_files
from pagewise_executor.models.weight_memory import checkpoint_bytes, stored_bytes, weight_bytes

CONTEXT_BYTES = 2**30
"""For CUDA's context and libraries: the most memory that an executor counts beside its own allocations."""
SHORT = 4096
"""Tokens of a short sequence."""


@dataclass(slots=True, frozen=True)
class GroupSizing:
    """A group of ``layers`` layers that see ``window`` tokens, 0: all of them. ``chunked``: these are the attention
    chunk of a token, and not the last ones. ``kv_per_token``: bytes."""

    layers: int
    window: int
    kv_per_token: int
    chunked: bool


@dataclass(slots=True, frozen=True)
class SequenceSizing:
    """A sequence of ``tokens`` tokens. ``decoding``: bytes of KV that it holds while it decodes; ``prefilling``: most
    bytes while its prompt is computed. ``fit``: the number of such sequences, of which one computes its prompt."""

    tokens: int
    decoding: int
    prefilling: int
    fit: float


@dataclass(slots=True, frozen=True)
class Sizing:
    """Bytes on each GPU, and the KV pool beside them.

    Fields:
        allowed: the executor's share of a GPU. ``weights``, ``context``, ``steps``, ``graphs``: the parts of it before
            the KV pool. ``kv_per_token``: K and V of all layers. ``pool``: the rest; negative if there is none.
        pool_tokens: tokens of one sequence that has the pool to itself. ``full_sequences``: sequences of
            ``max_model_len`` tokens that fit.
        groups: groups of layers that see the same tokens. ``recurrent_layers``: their number; ``state``: of all of
            them, behind one token. ``page_bytes``: bytes of a page, of which the blocks of all
            groups are made. ``sequences``: a short sequence, and one of ``max_model_len`` tokens.
    """

    allowed: int
    weights: int
    context: int
    steps: int
    graphs: int
    kv_per_token: int
    pool: int
    pool_tokens: int
    max_model_len: int
    full_sequences: float
    groups: tuple[GroupSizing, ...]
    recurrent_layers: int
    state: int
    page_bytes: int
    sequences: tuple[SequenceSizing, ...]


def sizing(config: ExecutorConfig, path: Path, gpu_memory: int) -> Sizing:
    """Return the memory of the model in the directory ``path`` on each GPU of ``gpu_memory`` bytes.

    Raises:
        PagewiseError: the model cannot be served, or not be divided like that; the text says why.
    """
    limits = with_step_limits(config, Gpu(gpu_memory))
    quantised = _served_quantisation(config, path)
    found: Any = transformers_config(config, path)
    text: Any = found.get_text_config(decoder=True)
    check_supported(config.model, found, text)
    check_latents(config, text)
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else text.dtype or torch.bfloat16
    model, recurrent = try_without_weights(config.model, found, dtype, trust_remote_code=config.trust_remote_code)
    if config.kv_dtype == "auto":
        store_once(model)
    weights = _weight_bytes(config, path, quantised, model, dtype) // config.tensor_parallel
    longest = int(text.max_position_embeddings) if config.max_model_len in (None, "auto") else int(config.max_model_len)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size  # Gemma 3n has one for each layer
    inner = (inner if isinstance(inner, int) else max(inner)) // config.tensor_parallel
    vocab = int(text.vocab_size)
    shard_config(config.model, text, config.tensor_parallel)
    attention = attention_modules(config.model, model, text)
    layers = [attention_shape(module, text, dtype) for module in attention]
    kept = [layers[source] for source in sorted(set(kv_sources(attention, text)))]
    states = _states(config, found, dtype) if recurrent else []
    memory, groups = _groups(config, kept, KV_TYPES.get(config.kv_dtype, dtype), longest, states)
    qkv = max((layer.heads + 2 * layer.kv_heads) * layer.head_dim for layer in layers)
    width = 4 * text.hidden_size + qkv + 3 * inner
    # Hidden states of the largest step, and the logits that graphs and sampling keep, as an executor counts them.
    steps = limits.max_num_batched_tokens * width * dtype.itemsize + 5 * limits.max_num_seqs * vocab * 4
    if len(groups) > 1:  # each slot has block tables; those of a model with one group take some megabytes
        shapes = table_shapes(memory, longest, config.block_size, limits.max_num_batched_tokens)
        steps += sum(shape.slots * shape.width for shape in shapes) * limits.max_num_seqs * 4
    sizes = sizes_up_to(min(limits.max_num_seqs, decode_graphs.LADDER[-1]), decode_graphs.LADDER)
    sizes += sizes_up_to(min(limits.max_num_batched_tokens, mixed_graphs.LARGEST), mixed_graphs.LADDER)
    graphs = len(sizes) * len(layers) * BYTES_PER_LAYER if config.cuda_graphs else 0
    allowed = int(gpu_memory * config.gpu_memory_utilization)
    pool = allowed - weights - CONTEXT_BYTES - steps - graphs
    pages, in_flight = max(0, pool) // memory.page_bytes, limits.tokens_in_flight
    tokens = memory.longest_sequence(pages, in_flight)
    longest = min(longest, tokens or longest) if config.max_model_len == "auto" else longest
    sequences = tuple(_sequence(memory, pages, one, in_flight) for one in sorted({min(SHORT, longest), longest}))
    return Sizing(
        allowed=allowed,
        weights=weights,
        context=CONTEXT_BYTES,
        steps=steps,
        graphs=graphs,
        kv_per_token=sum(group.kv_per_token for group in groups),
        pool=pool,
        pool_tokens=tokens,
        max_model_len=longest,
        full_sequences=sequences[-1].fit,
        groups=groups,
        recurrent_layers=len(states),
        state=sum(states),
        page_bytes=memory.page_bytes,
        sequences=sequences,
    )


def _served_quantisation(config: ExecutorConfig, path: Path) -> QuantisedCheckpoint | None:
    """Return how the checkpoint is quantised; None: not at all. Raises ``PagewiseError`` if the loader refuses it."""
    quantised = read_quantisation(config.model, path, config.kv_dtype)
    if quantised is not None and not quantised.mxfp4:
        check_quantised(config, path)
    return quantised


def _states(config: ExecutorConfig, part: Any, dtype: torch.dtype) -> list[int]:
    """Return the bytes of the states of each recurrent layer of a rank's part, which ``part`` describes."""
    trust, ranks = config.trust_remote_code, config.tensor_parallel
    tried = try_without_weights(config.model, part, dtype, trust_remote_code=trust, ranks=ranks)
    return [layer.num_bytes for layer in tried.recurrent]


def _weight_bytes(
    config: ExecutorConfig,
    path: Path,
    quantised: QuantisedCheckpoint | None,
    model: torch.nn.Module,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of the weights of a model without data, whose experts in MXFP4 one rank keeps in four bits.

    Other quantised checkpoints count as if all linear layers of their decoder layers, experts included, were quantised.
    """
    if quantised is not None and quantised.in_blocks:
        return stored_bytes(checked_headers(weight_files(config.model, path)), dtype)
    if quantised is None or quantised.mxfp4 or quantised.in_floats:
        if quantised is not None and quantised.mxfp4 and config.tensor_parallel == 1:
            place_mxfp4(model)
        return weight_bytes(model, dtype, config.quantization, on_gpu=config.device != "cpu")
    return checkpoint_bytes(model, dtype, quantised.four_bits)


def _groups(
    config: ExecutorConfig, layers: Sequence[AttentionShape], kv_dtype: torch.dtype, longest: int, states: Sequence[int]
) -> tuple[PageLayout, tuple[GroupSizing, ...]]:
    """Return the pages of a model with these layers, and its groups."""
    block_size, every = config.block_size, [layer.kv_shape for layer in layers]
    memory = layout_of_layers(config, layers, kv_dtype, longest, states) or single_group(every, block_size, kv_dtype)
    shapes = [[every[layer] for layer in group.layers] for group in memory.groups]
    return memory, tuple(
        GroupSizing(
            len(group.layers), group.window, bytes_per_block(own, block_size, kv_dtype) // block_size, group.chunked
        )
        for group, own in zip(memory.groups, shapes, strict=True)
    )


def _sequence(memory: PageLayout, pages: int, tokens: int, in_flight: int) -> SequenceSizing:
    decoding, prefilling = (memory.page_bytes * memory.pages_for(tokens, most) for most in (0, in_flight))
    return SequenceSizing(tokens, decoding, prefilling, round(memory.sequences_that_fit(pages, tokens, in_flight), 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit code: 1 if the model does not fit."""
    given = _parser().parse_args(argv)
    options = {name: value for name, value in vars(given).items() if value is not None}
    as_json, memory = options.pop("json"), options.pop("gpu_memory")
    try:
        config = build_config(ExecutorConfig, options, {})
        path = Path(given.model) if (Path(given.model) / "config.json").is_file() else None
        path = path or resolve_model(given.model, tokenizer_only=True)
        found = sizing(config, path, size := parse_size(memory))
        more = "more GPUs (--tensor-parallel), or larger ones"
        if not found.pool_tokens and config.quantization == "none":
            smaller = sizing(msgspec.structs.replace(config, quantization="fp8"), path, size)
            more += ", or --quantization fp8" * (smaller.pool_tokens > 0)
    except PagewiseError as error:
        print(f"pagewise size: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print_table(found, config.tensor_parallel, more)
    return 0 if found.pool_tokens else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewise size",
        description="Print the memory of a model on each GPU, and how many tokens of KV fit beside it, from its "
        "config.json: no weights are read. The memory of steps and graphs is an estimate.",
    )
    parser.add_argument("model", help="model directory, GGUF file, or hub id; of a directory config.json is enough")
    parser.add_argument("--gpu-memory", required=True, metavar="SIZE", help="memory of each GPU, such as 80GiB")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="GPUs that hold a part of the model each")
    parser.add_argument("--quantization", choices=("none", "fp8"), help="linear layers in eight bits")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), help="KV in eight bits")
    for name in ("dtype", "block-size", "max-model-len", "max-num-seqs", "max-num-batched-tokens"):
        parser.add_argument(f"--{name}", metavar="VALUE", help="as for pagewise serve")
    parser.add_argument("--gpu-memory-utilization", metavar="SHARE", help="as for pagewise serve (default: 0.9)")
    parser.add_argument("--json", action="store_true", help="print numbers in bytes, as JSON")
    return parser


def _print_table(found: Sizing, ranks: int, more: str) -> None:
    """Print the sizes. ``more``: what to take if nothing is left for KV."""
    print(f"on {'the GPU' if ranks == 1 else f'each of {ranks} GPUs'}:")
    for name in ("allowed", "weights", "context", "steps", "graphs"):
        print(f"  {name:<10}{getattr(found, name) / 2**30:>8.2f} GiB")
    several = len(found.groups) > 1 or found.state > 0
    if found.pool_tokens:
        tokens = f"a sequence of up to {found.pool_tokens:,} tokens" if several else f"{found.pool_tokens:,} tokens"
        print(f"  {'KV pool':<10}{found.pool / 2**30:>8.2f} GiB: {tokens}")
    else:
        print(f"  nothing is left for KV: take {more}")
    for group in found.groups:
        part = "their chunk of" if group.chunked else "the last"
        seen = f"{part} {group.window:,} tokens" if group.window else "all tokens"
        where = f" in {group.layers} layers that see {seen}" if several else ""
        print(f"  each token of KV takes {group.kv_per_token / 1024:.4g}KiB{where}")
    if found.state:
        print(f"  the states of {found.recurrent_layers} recurrent layers take {found.state / 2**20:.4g}MiB")
    if not several:
        if found.pool_tokens:
            longest = f"{found.max_model_len:,} tokens, the longest there are"
            print(f"  that is {found.full_sequences:g} sequences of {longest}")
        return
    for one in found.sequences:
        sizes = (
            f"{one.decoding / 2**30:.2f} GiB, and up to {one.prefilling / 2**30:.2f} GiB while its prompt is computed"
        )
        print(f"  a sequence of {one.tokens:,} tokens takes {sizes}" + f": {one.fit:g} fit" * bool(found.pool_tokens))


if __name__ == "__main__":
    sys.exit(main())
