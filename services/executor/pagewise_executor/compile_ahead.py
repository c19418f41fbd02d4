"""Compiles the Triton kernels of a model of Llama's structure before they are launched, in parallel.

    python -m pagewise_executor.compile_ahead '{"config": {"model": "FOLDER"}, "capability": 90}'

A process of its own rehearses the start of an executor: it makes the calls of the start, with a model of one layer of
each kind whose tensors hold no data (torch's device "meta"), and each launch is compiled instead of run. It reads
config.json and no weights, and uses no GPU, so images can be built with the kernels of a model. The kernels are stored
in Triton's cache. A launch that the rehearsal misses is compiled at its first call.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import torch
from pagewise_kernels.attention import Chunk
from pagewise_kernels.compile import filling_cache
from pagewise_kernels.launch import use_dependent_launch
from pagewise_shared.cpu_threads import available_cores

from pagewise_executor.adapters.adapters import make_adapters
from pagewise_executor.attention.registry import kv_dtype_for, layout_of
from pagewise_executor.attention.triton_attention import TritonBackend, TritonStep
from pagewise_executor.cuda_graphs.graphed_steps import GraphedSteps
from pagewise_executor.device_defaults import Gpu, SizedConfig, with_step_limits
from pagewise_executor.forward_pass import ForwardPass, StepCompute, triton_compute
from pagewise_executor.kernel_checks.kernels import KERNELS, kernels_of
from pagewise_executor.kernel_checks.use import use_of
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.segment_mover import KeyRotation
from pagewise_executor.models.compilation import Ahead
from pagewise_executor.models.families import read_llama_config
from pagewise_executor.models.few_rows import choose_few_rows
from pagewise_executor.models.llama import LlamaForCausalLM
from pagewise_executor.models.llama_config import LlamaConfig
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.operations import TritonOperations
from pagewise_executor.models.preparation import prepare
from pagewise_executor.models.shard_settings import shard_config
from pagewise_executor.models.support import attention_modules, attention_shape
from pagewise_executor.warm_up import CHUNKS, launch_sampling

log = logging.getLogger(__name__)

_META = torch.device("meta")
_BLOCKS = 64


@torch.inference_mode()
def compile_ahead(ahead: Ahead, threads: int) -> None:
    """Compile the kernels of an executor into Triton's cache, by so many ``threads``.

    Raises:
        NotReadableError: the model is not of Llama's structure. ModelError: it cannot be divided among the ranks.
    """
    config = with_step_limits(ahead.config, Gpu(ahead.total_memory, ahead.capability // 10))
    text = read_llama_config(Path(config.model))
    vocab_size = text.vocab_size
    shard_config(config.model, text, ahead.ranks)
    use_dependent_launch(config.dependent_launch)
    with filling_cache(ahead.capability, ahead.num_sms, threads):
        loaded = _loaded(config, text, vocab_size)
        last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=_META)
        if not config.deterministic:
            choose_few_rows(loaded.model, TritonOperations(), _run)  # before adapters wrap the products
        chosen = triton_compute(config, loaded, last_tokens, make_adapters(config, loaded))
        kv_dtype, layout = kv_dtype_for(config, loaded.dtype, TritonBackend, _META), layout_of(config, TritonBackend)
        pool = KVPool(loaded.shapes, _BLOCKS, config.block_size, kv_dtype, _META, layout=layout, triton=True)
        chosen.forward_pass.attach(pool)
        for name, call in _launches(config, loaded, chosen, kv_dtype):
            try:
                call()
            except (NotImplementedError, RuntimeError) as error:  # an operation of torch's that needs data
                log.debug("%s: %s", name, error)


def _loaded(config: SizedConfig, text: LlamaConfig, vocab_size: int) -> LoadedModel:
    """Return a model of one layer of each kind, whose tensors hold no data."""
    kinds = list(dict.fromkeys(text.windows))
    text.num_hidden_layers = len(kinds)
    dtype = (text.dtype or torch.bfloat16) if config.dtype == "auto" else getattr(torch, config.dtype)
    most = config.max_model_len if isinstance(config.max_model_len, int) else text.max_position_embeddings
    model = LlamaForCausalLM(text, kinds).eval().requires_grad_(False).to(_META, dtype)
    attention = attention_modules(config.model, model, text)
    prepare(config, model, "triton", len(attention), most, _META)
    return LoadedModel(
        model=model, fingerprint="", weight_files=[], vocab_size=vocab_size, max_model_len=most, device=_META,
        dtype=dtype, attention=attention, layers=[attention_shape(one, text, dtype) for one in attention],
        kernels="triton",
        rotations=[KeyRotation(model.model.rotary_emb.inv_freq)] * len(attention),
    )  # fmt: skip


def _launches(
    config: SizedConfig, loaded: LoadedModel, chosen: StepCompute, kv_dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls by which a start launches its kernels, first the kernels that take long to compile."""
    graphs = chosen.graphs
    assert graphs is not None
    for size, uses in product(graphs.mixed.sizes, graphs.mixed.variants()):
        yield "steps with chunks", partial(_compute, graphs.mixed, size, uses=uses)
    backend = TritonBackend(
        _META, config.max_num_seqs, loaded.max_model_len, config.block_size, deterministic=config.deterministic
    )
    for size in (*CHUNKS, graphs.mixed.sizes[-1] + 1):
        yield "chunks", partial(_prefill, chosen.forward_pass, backend, size)
    yield "decodes", graphs.decodes.warm_up
    use = use_of(config, loaded, kv_dtype)
    for name in kernels_of(use):
        yield name, partial(deque, KERNELS[name][1](use), 0)
    yield "sampling", partial(launch_sampling, loaded.vocab_size, loaded.dtype, _META)
    if (slots := graphs.decodes.adapters) is not None:
        yield "adapters", slots.warm_up


def _compute(steps: GraphedSteps, size: int, *, uses: bool) -> None:
    steps.clear(size)
    steps.use_adapters(size, uses=uses)
    steps.compute(size)


def _prefill(forward_pass: ForwardPass, backend: TritonBackend, size: int) -> None:
    ids, nothing = torch.zeros(size, dtype=torch.int64, device=_META), torch.zeros(0, dtype=torch.int32, device=_META)
    forward_pass.forward_context.step = TritonStep(
        backend, [ids], backend.tables.slots, nothing, nothing, [Chunk(0, 0, size, 0)]
    )
    forward_pass.forward(ids, ids)


def _run(call: Callable[[], None]) -> float:
    """Run a call as if it took no time: no product is slower than another, so all of them run."""
    call()
    return 0.0


def main() -> None:
    """Compile the kernels of the ``Ahead`` that is the first argument, in JSON."""
    compile_ahead(msgspec.json.decode(sys.argv[1], type=Ahead), max(1, available_cores() - 1))


if __name__ == "__main__":
    main()
