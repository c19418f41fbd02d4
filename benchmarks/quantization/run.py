"""The effect of ``--quantization``, ``--kv-dtype int8`` and bfloat16 on next-token distributions, beside float32.

    python -m benchmarks.quantization.run [--model FOLDER] [--only NAME ...] [--json FILE]

The texts are modules of Python's standard library, which the demo model was trained on. All models see the same
tokens, so each position is one comparison: the Kullback-Leibler divergence from the exact distribution, and whether the
likeliest token is the same one. ``greedy``: how many tokens that the exact model generates greedily the other one
generates as well, before the first that differs. ``fp8 weights``: with
inputs that are not rounded, as on GPUs without FP8. ``int4 weights``: likewise.
"""

import argparse
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
from pagewise_executor.models.packed_linear import Int4Linear, Quantization, pack_linears, quantisation_of
from pagewise_executor.models.preparation import parts_of
from pagewise_executor.models.quantised_linear import QuantisedLinear, quantise_linears
from pagewise_executor.models.quantised_weight import FP8, Inputs, quantise_inputs
from pagewise_shared.model_files import resolve_model
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.record import record_file, write_record

_FILES = ("ast", "bisect", "calendar", "csv", "dataclasses", "difflib", "fractions", "heapq", "queue", "textwrap")
_LENGTH, _NEW = 512, 64


class _Unpacked(torch.nn.Module):
    """Computes a layer in eight bits from weights that are made float32 once."""

    def __init__(self, linear: QuantisedLinear, inputs: Inputs) -> None:
        super().__init__()
        self.exact, self.bias, self.inputs = linear.quantised.dequantised(), linear.bias, inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs.quantised:
            values, scales = quantise_inputs(x.flatten(0, -2), FP8, self.inputs)
            x = (values * scales).view(x.shape)
        return torch.nn.functional.linear(x, self.exact, self.bias)


class _ExactInputs(torch.nn.Module):
    """Computes a layer in four bits with inputs in float32."""

    def __init__(self, linear: Int4Linear) -> None:
        super().__init__()
        self.packed = linear.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.linear(x.flatten(0, -2), exact=True).view(*x.shape[:-1], -1)


def _packed(model: Any, quantization: Quantization) -> Any:
    """Return a model with the linear layers that ``--quantization`` makes."""
    for part in list(parts_of(model)):
        pack_linears(model, "cpu", quantisation_of(part, quantization), part)
    return model


def _attend_to_int8(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
) -> Any:
    """Compute attention with K and V [1, heads, tokens, head_dim] that are rounded by token and head."""
    rounded = (quantise_inputs(part.flatten(0, -2), torch.int8) for part in (key, value))
    key, value = (values.mul_(scales).view(key.shape) for values, scales in rounded)
    interface: Any = AttentionInterface
    return interface()["sdpa"](module, query, key, value, *mask, **options)


def _differences(exact: Any, other: Any, texts: list[torch.Tensor]) -> dict[str, Any]:
    """Compare two models on texts, each [1, tokens]."""
    divergences: list[float] = []
    agreeing = 0
    greedy: list[int] = []
    for ids in texts:
        wanted, found = (model(ids).logits[0].float().log_softmax(-1) for model in (exact, other))
        divergences += (wanted.exp() * (wanted - found)).sum(-1).tolist()
        agreeing += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        outputs = [
            model.generate(ids[:, : _LENGTH // 2], max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False)[0]
            for model in (exact, other)
        ]
        same = (outputs[0] == outputs[1])[_LENGTH // 2 :].int()
        greedy.append(int(same.cumprod(0).sum()))
    return {
        "positions": len(divergences),
        "kl_mean": round(statistics.mean(divergences), 6),
        "kl_largest": round(max(divergences), 4),
        "argmax_agreement": round(agreeing / len(divergences), 4),
        "greedy": greedy,
        "greedy_length": _NEW,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pagewise-demo")
    parser.add_argument("--only", nargs="+", help="what to compare, such as fp8; by default everything")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    path = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    kind: Any = AutoModelForCausalLM

    def exact_model() -> Any:
        return kind.from_pretrained(path, dtype=torch.float32).eval()

    exact = exact_model()
    others = {
        "int8": _packed(exact_model(), "int8"), "int4": _packed(exact_model(), "int4"),
        "int4 weights": _packed(exact_model(), "int4"),
        "bfloat16": kind.from_pretrained(path, dtype=torch.bfloat16).eval(),
    }  # fmt: skip
    for place, module in list(others["int4 weights"].named_modules()):
        if isinstance(module, Int4Linear):
            others["int4 weights"].set_submodule(place, _ExactInputs(module))
    AttentionInterface.register("rounded", _attend_to_int8)
    others["KV int8"] = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="rounded").eval()
    for name, inputs in (("fp8", Inputs()), ("fp8 weights", Inputs(quantised=False))):
        others[name] = exact_model()
        for layer in range(len(others[name].model.layers)):
            quantise_linears(others[name], FP8, f"model.layers.{layer}")
        for place, module in list(others[name].named_modules()):
            if isinstance(module, QuantisedLinear):
                others[name].set_submodule(place, _Unpacked(module, inputs))
    texts = [(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text() for name in _FILES]
    ids = [torch.tensor([tokenizer(text)["input_ids"][:_LENGTH]]) for text in texts]
    with torch.inference_mode():
        numbers = {
            name: _differences(exact, other, ids)
            for name, other in others.items()
            if args.only is None or name in args.only
        }
    for name, row in numbers.items():
        for key, value in row.items():
            print(f"{name:>13} {key:>17} {value}")
    if args.json:
        write_record(args.json, numbers)


if __name__ == "__main__":
    main()
