"""Quantised checkpoints on disk, made by hand of tiny models, and their expected results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.loader import LoadedModel
from pagewise_shared.config import ExecutorConfig
from torch import nn

from tests.executor.driver import request, run_requests
from tests.model_builders import build_model

FP8 = torch.float8_e4m3fn
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40)]
MOST = {FP8: 448.0, torch.int8: 127.0}
ERROR = 0.002
"""Largest error of a linear layer beside float64, relative to its largest output: an input may be rounded the other way
where float32 and float64 disagree. In bfloat16 results are rounded, too."""


class Form(NamedTuple):
    """How linear layers are quantised: see ``FORMS``. ``group``: inputs of a row with one scale, 0 for the row."""

    dtype: torch.dtype
    block: tuple[int, int]
    inputs: str
    config: dict[str, Any]
    group: int = 0
    packed: bool = False
    scale: str = "weight_scale"
    input_scale: str = "input_scale"


def _compressed(kind: str, strategy: str, inputs: dict[str, Any] | None, form: str, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it into config.json."""
    common = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "block_structure": None,
              "actorder": None, "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": None if inputs is None else common | {"observer": None} | inputs,
        "output_activations": None,
        "format": form,
    }
    return {
        "config_groups": {"group_0": group}, "format": form, "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.13.0",
    }  # fmt: skip


_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
_OF_DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 32]}

FORMS = {
    "fp8 per channel": Form(FP8, (1, 0), "token", _compressed("float", "channel", _TOKEN, "float-quantized")),
    "fp8 per tensor": Form(FP8, (0, 0), "static", _compressed("float", "tensor", _STATIC, "naive-quantized")),
    "fp8 per block": Form(
        FP8,
        (16, 32),
        "token",
        _compressed("float", "block", {"strategy": "group", "group_size": 32, "dynamic": True}, "float-quantized",
                    block_structure=[16, 32]),
        group=32,
    ),
    "fp8 of deepseek": Form(FP8, (16, 32), "token", _OF_DEEPSEEK, group=32, scale="weight_scale_inv"),
    "fp8 of deepseek 3.1": Form(
        FP8, (16, 32), "token", _OF_DEEPSEEK | {"scale_fmt": "ue8m0"}, group=32, scale="weight_scale_inv"
    ),
    "fp8 of autofp8": Form(
        FP8, (0, 0), "static", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    ),
    "fp8 of transformers": Form(
        FP8, (0, 0), "static", _OF_DEEPSEEK | {"weight_block_size": None, "activation_scheme": "static"},
        scale="weight_scale_inv", input_scale="activation_scale",
    ),
    "fp8 weights": Form(FP8, (1, 0), "none", _compressed("float", "channel", None, "float-quantized")),
    "int8 per channel": Form(torch.int8, (1, 0), "token", _compressed("int", "channel", _TOKEN, "int-quantized")),
    "int8 static": Form(torch.int8, (1, 0), "static", _compressed("int", "channel", _STATIC, "int-quantized")),
    "int8 weights": Form(
        torch.int8, (1, 16), "none", _compressed("int", "group", None, "pack-quantized", group_size=16), packed=True
    ),
}  # fmt: skip
"""The forms that are served, by name."""


class OracleLinear(nn.Module):
    """A quantised linear layer in float64. ``tensors``: as they lie on disk, but for packing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, form: Form) -> None:
        super().__init__()
        outs, ins = weight.shape
        self.form, self.bias = form, None if bias is None else bias.detach()
        rows, columns = form.block[0] or outs, form.block[1] or ins
        blocks = [block.split(columns, dim=1) for block in weight.detach().double().split(rows)]
        # A scale is stored in bfloat16 by most.
        scales = torch.tensor([[float(block.abs().max()) / MOST[form.dtype] for block in row] for row in blocks])
        self.scales = scales.bfloat16()
        spread = self.scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outs, :ins]
        self.values = rounded(weight.detach().double() / spread, form.dtype)
        self.exact = self.values.double() * spread
        self.input_scale = torch.tensor([6.0 / MOST[form.dtype]]) if form.inputs == "static" else None
        self.weight = weight  # for its type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        if self.form.inputs != "none":
            group = self.form.group or x.shape[-1]
            parts = [
                rounded(part / scale, self.form.dtype).double() * scale
                for part in wide.split(group, dim=-1)
                for scale in [self._scale(part)]
            ]
            wide = torch.cat(parts, dim=-1)
        result = wide @ self.exact.T
        return (result if self.bias is None else result + self.bias.double()).to(x.dtype)

    def _scale(self, part: torch.Tensor) -> torch.Tensor:
        if self.input_scale is not None:
            return self.input_scale.double()
        most = part.abs().amax(dim=-1, keepdim=True) / MOST[self.form.dtype]
        if self.form.config.get("scale_fmt") == "ue8m0":
            most = most.float().log2().ceil().exp2().double()
        return torch.where(most > 0, most, 1.0)

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, by the ends of their names."""
        found = {self.form.scale: self.scales}
        if self.form.packed:
            outs, ins = self.values.shape
            padded = nn.functional.pad(self.values.int() + 128, (0, -ins % 4)).view(outs, -1, 4)
            shifted = (padded << torch.tensor([0, 8, 16, 24])).sum(dim=2)
            found |= {"weight_packed": shifted.to(torch.int32), "weight_shape": torch.tensor([outs, ins])}
        else:
            found["weight"] = self.values
        if self.input_scale is not None:
            found[self.form.input_scale] = self.input_scale
        return found if self.bias is None else found | {"bias": self.bias}


NAMES, MIXTRAL_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


class OracleExperts(nn.ModuleList):
    """The experts of a mixture, each of three such layers."""

    def __init__(self, fused: Any, form: Form) -> None:
        super().__init__()
        self.act = [fused.act_fn]  # not as a module, which would be an expert
        for gate_up, down in zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True):
            weights = (*gate_up.chunk(2), down)
            linears = {name: OracleLinear(one, None, form) for name, one in zip(NAMES, weights, strict=True)}
            self.append(nn.ModuleDict(linears))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                gate, up, down = (self[expert][name] for name in NAMES)  # type: ignore[index]
                row = x[token : token + 1]
                result[token] += share * down(self.act[0](gate(row)) * up(row))[0]
        return result


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest values of ``dtype``."""
    cut = exact.clamp(-MOST[dtype], MOST[dtype])
    return cut.round().to(dtype) if dtype == torch.int8 else cut.float().to(dtype)


def build_quantised(form: Form, path: Path, family: str = "llama", **settings: Any) -> transformers.PreTrainedModel:
    """Save a quantised model under ``path``; return a model with the expected results."""
    model = build_model(family, path, **settings)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            oracle = OracleLinear(module.weight, module.bias, form)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{end}": tensor.contiguous() for end, tensor in oracle.stored().items()}
            model.set_submodule(name, oracle)
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            experts = OracleExperts(module, form)
            in_files = dict(zip(NAMES, MIXTRAL_NAMES if family == "mixtral" else NAMES, strict=True))
            there = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{there}.")}
            for own, linear in experts.named_modules(prefix=there):
                if isinstance(linear, OracleLinear):
                    expert, _, half = own.rpartition(".")
                    at = f"{expert}.{in_files[half]}"
                    tensors |= {f"{at}.{end}": tensor.contiguous() for end, tensor in linear.stored().items()}
            model.set_submodule(name, experts)
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_config(path, quantization_config=form.config)
    return model


def edit_config(path: Path, **values: object) -> None:
    """Change config.json in place."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def check_layers(loaded: LoadedModel, oracle: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """The fused linear layers compute the expected results of their parts, side by side."""
    layers = [module for module in loaded.model.modules() if isinstance(module, FusedDecoderLayer)]
    assert len(layers) == len(oracle.model.layers) >= 1
    generator = torch.Generator().manual_seed(1)
    for ours, theirs in zip(layers, oracle.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        for module, parts in (
            (ours.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (ours.out, [attention.o_proj]),
            (ours.gate_up, [mlp.gate_proj, mlp.up_proj]),
            (ours.down, [mlp.down_proj]),
        ):
            x = torch.randn(7, parts[0].weight.shape[1], generator=generator).to(dtype)
            expected = torch.cat([part(x.double()) for part in parts], dim=-1)
            found = module(x.to(device)).cpu()
            assert found.dtype == dtype
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert float(error) <= (ERROR if dtype == torch.float32 else 0.01)


def check_served(
    path: Path, oracle: Any, within: float = 0.05, prompts: Sequence[list[int]] = PROMPTS, **options: Any
) -> None:
    """Tokens that are generated are likely to the oracle, with the log-probabilities that it gives them, ``within``
    this distance."""
    config = ExecutorConfig(model=str(path), device="cpu", num_blocks=64, **({"profile": False} | options))
    runner = ModelRunner(config)
    requests = [request(prompt, 12, f"r{n}", logprobs=0) for n, prompt in enumerate(prompts)]
    for prompt, asked in zip(prompts, requests, strict=True):
        _, outputs = run_requests(runner, [asked], max_num_batched_tokens=24)
        tokens = asked.sequences[0].output_token_ids.tolist()
        found = torch.tensor([entry.logprob for output in outputs for entry in output.logprobs.values()])
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=within, rtol=0.0)
        assert bool((expected >= logprobs.amax(dim=1) - within).all())
