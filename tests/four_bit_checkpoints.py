"""Checkpoints in four bits, made of tiny models by the formulas of their formats, and the dequantised models."""

from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import transformers
from torch import nn

from tests.model_builders import build_model
from tests.quantised_checkpoints import MIXTRAL_NAMES, NAMES, edit_config

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each place in a word of AWQ, from the lowest bits on."""


class FourBits(NamedTuple):
    """``form``: gptq, gptq_v2, awq or compressed. ``group``: 0: all inputs. ``scattered``: the inputs of a group."""

    form: str
    zeros: bool = True
    scattered: bool = False
    group: int = GROUP

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config, as AutoGPTQ, AutoAWQ and llm-compressor write it."""
        group = self.group or -1
        if self.form.startswith("gptq"):
            return {
                "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": self.scattered,
                "sym": not self.zeros, "checkpoint_format": self.form, "damp_percent": 0.1, "true_sequential": True,
                "lm_head": False, "dynamic": {"-:.*lm_head": {}, "model.embed_tokens": {}},
            }  # fmt: skip
        if self.form == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "group_size": 16}
        if self.form == "nvfp4":
            float4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
            groups = {"targets": ["Linear"], "weights": float4 | {"dynamic": False},
                     "input_activations": float4 | {"dynamic": "local"}, "output_activations": None}  # fmt: skip
            return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
                    "config_groups": {"group_0": groups}}  # fmt: skip
        if self.form == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
                    "modules_to_not_convert": None}  # fmt: skip
        weights = {
            "num_bits": 4, "type": "int", "symmetric": not self.zeros, "strategy": "group" if self.group else "channel",
            "group_size": self.group or None, "dynamic": False, "actorder": "group" if self.scattered else None,
            "block_structure": None, "observer": "minmax",
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                                          "output_activations": None}},
        }  # fmt: skip


FORMS = {
    "gptq": FourBits("gptq"),
    "gptq, symmetric, act-order": FourBits("gptq", zeros=False, scattered=True),
    "gptq_v2, act-order": FourBits("gptq_v2", scattered=True),
    "gptq per channel": FourBits("gptq", group=0),
    "awq": FourBits("awq"),
    "compressed-tensors": FourBits("compressed", zeros=False),
    "compressed-tensors, zeros": FourBits("compressed"),
    "compressed-tensors, act-order": FourBits("compressed", zeros=False, scattered=True),
    "compressed-tensors per channel": FourBits("compressed", zeros=False, group=0),
    "nvfp4": FourBits("nvfp4", zeros=False, group=16),
    "modelopt nvfp4": FourBits("modelopt", zeros=False, group=16),
}


class Layer(NamedTuple):
    """A linear layer in four bits: its tensors on disk, by the ends of their names, and its weight in float64."""

    stored: dict[str, torch.Tensor]
    exact: torch.Tensor


def words(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to 15 [rows, n] as int32 [rows, n / 8], the first in the lowest bits."""
    padded = nn.functional.pad(values.long(), (0, -values.shape[1] % 8)).unflatten(1, (-1, 8))
    joined = (padded << torch.arange(0, 32, 4)).sum(dim=2)
    return (joined - (joined >> 31 << 32)).to(torch.int32)


def words_of_awq(values: torch.Tensor) -> torch.Tensor:
    """Likewise in AWQ's order."""
    return words(values.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def in_nvfp4(weight: torch.Tensor, form: str) -> Layer:
    """Quantise a weight [outs, ins] to e2m1 with scales in float8 for 16 inputs, and one for layers of up to 8."""
    unit = 8 / (6 * 448)
    blocks = weight.detach().double().unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(dim=2) / 6 / unit).to(torch.float8_e4m3fn)
    steps = scales.double()[..., None] * unit
    ratios = torch.where(steps > 0, blocks / steps, 0.0)
    codes = (ratios.abs()[..., None] - E2M1).abs().argmin(dim=-1)
    exact = E2M1[codes] * ratios.sign() * steps
    codes = (codes + 8 * (ratios < 0)).flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    stored = {"weight_scale": scales}
    if form == "modelopt":
        stored |= {"weight": packed, "weight_scale_2": torch.tensor(unit), "input_scale": torch.tensor(0.1)}
    else:
        whole = {"weight_global_scale": torch.tensor([1 / unit]), "input_global_scale": torch.tensor([10.0])}
        stored |= {"weight_packed": packed} | whole
    return Layer(stored, exact.flatten(1))


def quantised(weight: torch.Tensor, form: FourBits, group_of: torch.Tensor) -> Layer:
    """Quantise a weight [outs, ins]. ``group_of``: the group of each input, if they are scattered."""
    if form.form in ("nvfp4", "modelopt"):
        return in_nvfp4(weight, form.form)
    outs, ins = weight.shape
    groups = -(-ins // form.group) if form.group else 1
    of = group_of if form.scattered else torch.arange(ins) // (form.group or ins)
    members = [weight.detach().double()[:, of == group] for group in range(groups)]
    least, most = (torch.stack([getattr(one, end)(dim=1).values for one in members], 1) for end in ("min", "max"))
    kind = torch.bfloat16 if form.form == "compressed" else torch.float16
    scales = ((most - least) / 15 if form.zeros else torch.maximum(most, -least) / 7.5).to(kind)
    zeros = torch.full_like(least, 8)
    if form.zeros:
        zeros = (-least / scales.double()).round().clamp(int(form.form == "gptq"), 15)
    codes = ((weight.detach().double() / scales.double()[:, of]).round() + zeros[:, of]).clamp(0, 15)
    exact = (codes - zeros[:, of]) * scales.double()[:, of]
    if form.form == "awq":
        stored = {"qweight": words_of_awq(codes.t()), "qzeros": words_of_awq(zeros.t()), "scales": scales.t()}
    elif form.form == "compressed":
        stored = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([outs, ins])}
        if form.zeros:
            stored["weight_zero_point"] = words(zeros.t()).t()
        if form.scattered:
            stored["weight_g_idx"] = of.int()
    else:
        first = int(form.form == "gptq")
        stored = {"qweight": words(codes).t(), "qzeros": words((zeros - first).t()), "scales": scales.t()}
        stored["g_idx"] = of.int()
    return Layer({end: tensor.contiguous() for end, tensor in stored.items()}, exact)


def build_four_bits(form: FourBits, path: Path, family: str = "llama", **settings: Any) -> transformers.PreTrainedModel:
    """Save a tiny model in four bits under ``path``; return the model with dequantised weights."""
    model = build_model(family, path, **settings)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)

    def place(name: str, weight: torch.Tensor) -> None:
        """Quantise a weight in place, and its tensors in the file."""
        tensors.pop(f"{name}.weight", None)
        # Layers with the same inputs have the same order of them.
        generator.manual_seed(weight.shape[1])
        order = torch.randperm(weight.shape[1], generator=generator)
        layer = quantised(weight, form, (torch.arange(weight.shape[1]) // (form.group or weight.shape[1]))[order])
        tensors.update({f"{name}.{end}": tensor for end, tensor in layer.stored.items()})
        weight.data.copy_(layer.exact)

    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            place(name, module.weight)
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            there = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
            for key in [key for key in tensors if key.startswith(f"{there}.")]:
                del tensors[key]
            own: Any = module
            for expert, (gate_up, down) in enumerate(zip(own.gate_up_proj, own.down_proj, strict=True)):
                # llm-compressor gives the experts of Mixtral the names of other families.
                names = MIXTRAL_NAMES if family == "mixtral" and form.form != "compressed" else NAMES
                for end, weight in zip(names, (*gate_up.data.chunk(2), down.data), strict=True):
                    place(f"{there}.{expert}.{end}", weight)
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_config(path, quantization_config=form.config)
    return model
