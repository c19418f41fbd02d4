"""Quality in fewer bits: a model with weights, KV or tiers in each format, beside itself in float32.

    python -m benchmarks.quantization.run [--model FOLDER] [--text FILE] [--only NAME ...] [--json FILE]
    make quality MODEL=FOLDER

The texts are modules of Python's standard library, which the demo model was trained on, or pieces of ``--text``. All
formats see the same tokens, so each position is one comparison: the Kullback-Leibler divergence from the exact
distribution of the next token, and whether the likeliest token is the same one. ``perplexity``: of the text, and
``perplexity_exact`` of the same positions in float32. ``greedy``: how many tokens that the exact model generates
greedily the other one generates as well, before the first that differs.

``KV``: all keys and values are rounded. ``tier``: the first half of a text has been computed exactly, and comes back
from a tier; the second half is compared. ``fp8 weights``: with inputs that are not rounded, as on GPUs without FP8.
``int4 weights``: likewise. ``int4 with a text``: as with ``--quantization-text``, of other modules, or of the part of
``--text`` behind the pieces. transformers computes with the rounded numbers in float32, except for linear layers in
int8 and int4, which the CPU operations compute.
"""

import argparse
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pagewise_executor.models.calibration import Calibration
from pagewise_executor.models.packed_linear import Int4Linear, Quantization, is_layer, pack_linears, quantisation_of
from pagewise_executor.models.preparation import parts_of
from pagewise_executor.models.quantised_linear import QuantisedLinear, quantise_linears
from pagewise_executor.models.quantised_weight import FP8, Inputs, quantise_inputs
from pagewise_shared.model_files import resolve_model
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.quantization.rounding import Rounding, to_bfloat16, to_fp8, to_int4, to_int4_by_channel, to_int8
from benchmarks.record import record_file, write_record

_FILES = ("ast", "bisect", "calendar", "csv", "dataclasses", "difflib", "fractions", "heapq", "queue", "textwrap")
_OTHER_FILES = (
    "argparse", "configparser", "ftplib", "inspect", "locale", "mailbox", "optparse", "pathlib", "pickle", "shlex",
    "smtplib", "socket", "subprocess", "tarfile", "threading", "zipfile",
)  # fmt: skip
_LENGTH, _NEW = 512, 64
_KV: dict[str, tuple[Rounding, Rounding]] = {
    "KV bfloat16": (to_bfloat16, to_bfloat16),
    "KV fp8": (to_fp8, to_fp8),
    "KV int8": (to_int8, to_int8),
    "KV int4": (to_int4, to_int4),
    "KV int4, keys by channel": (to_int4_by_channel, to_int4),
}
_TIERS: dict[str, Rounding] = {"tier int8": to_int8, "tier int4": to_int4}


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


class Formats:
    """The model in ``path`` in each format, made when it is asked for: two models are in memory at a time.

    ``sample``: the tokens of ``_sample``.
    """

    def __init__(self, path: Path, sample: torch.Tensor | None) -> None:
        self._path, self._sample = path, sample
        self._rounding: tuple[Rounding, Rounding] = (to_int8, to_int8)
        AttentionInterface.register("rounded", self._attend)
        quantisations: tuple[Quantization, ...] = ("int8", "int4")
        self.make: dict[str, Callable[[], Any]] = {
            **{name: partial(self._packed, name) for name in quantisations},
            **({"int4 with a text": self._calibrated} if sample is not None else {}),
            "int4 weights": lambda: _replaced(self._packed("int4"), Int4Linear, _ExactInputs),
            "fp8": lambda: self._fp8(Inputs()),
            "fp8 weights": lambda: self._fp8(Inputs(quantised=False)),
            "bfloat16": lambda: self.exact(dtype=torch.bfloat16),
            **{name: partial(self._rounded, rounding) for name, rounding in _KV.items()},
        }

    def exact(self, **options: Any) -> Any:
        """Return the model, in float32 unless ``options`` of transformers name another type."""
        kind: Any = AutoModelForCausalLM
        return kind.from_pretrained(self._path, **{"dtype": torch.float32, **options}).eval()

    def _packed(self, quantization: Quantization) -> Any:
        """Return the model with the linear layers that ``--quantization`` makes."""
        model = self.exact()
        for part in list(parts_of(model)):
            pack_linears(model, "cpu", quantisation_of(part, quantization), part)
        return model

    def _calibrated(self) -> Any:
        """Return the model in int4 by the sample. transformers sees where a piece of it begins by its positions."""
        model = self.exact()
        parts = list(parts_of(model))
        assert self._sample is not None
        calibration = Calibration(self._sample, {})

        def done(part: str) -> None:
            pack_linears(model, "cpu", "int4", part, calibration.quantise)

        layers = [part for part in parts if is_layer(part)]
        calibration.compute(model, layers, len(layers), lambda part: None, done)
        for part in parts:
            if part not in layers:
                pack_linears(model, "cpu", quantisation_of(part, "int4"), part)
        return model

    def _fp8(self, inputs: Inputs) -> Any:
        model = self.exact()
        for part in list(parts_of(model)):
            if quantisation_of(part, "fp8") == "fp8":
                quantise_linears(model, FP8, part)
        return _replaced(model, QuantisedLinear, lambda linear: _Unpacked(linear, inputs))

    def _rounded(self, rounding: tuple[Rounding, Rounding]) -> Any:
        self._rounding = rounding
        return self.exact(attn_implementation="rounded")

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
    ) -> Any:
        """Compute attention with rounded K and V [1, heads, tokens, head_dim]."""
        interface: Any = AttentionInterface
        key, value = (each(part) for each, part in zip(self._rounding, (key, value), strict=True))
        return interface()["sdpa"](module, query, key, value, *mask, **options)


def _replaced(model: Any, kind: type[torch.nn.Module], by: Callable[[Any], torch.nn.Module]) -> Any:
    """Return the model with each module of a kind replaced."""
    for place, module in list(model.named_modules()):
        if isinstance(module, kind):
            model.set_submodule(place, by(module))
    return model


def _prefix(model: Any, ids: torch.Tensor, rounding: Rounding | None) -> Any:
    """Return a cache of the tokens ``ids`` [1, tokens], with K and V rounded as a tier does."""
    cache: Any = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    if rounding is not None:
        for layer in cache.layers:
            layer.keys, layer.values = rounding(layer.keys), rounding(layer.values)
    return cache


def _logits(model: Any, ids: torch.Tensor, recovered: Rounding | None) -> torch.Tensor:
    """Return the log-probabilities of the tokens behind ``ids`` [1, tokens]: of all, or of the second half behind a
    prefix that was recovered from a tier."""
    if recovered is None:
        logits: torch.Tensor = model(ids).logits[0]
    else:
        half = ids.shape[1] // 2
        cache = _prefix(model, ids[:, :half], recovered)
        logits = model(ids[:, half:], past_key_values=cache).logits[0]
    return logits.float().log_softmax(-1)


def _greedy(model: Any, prompt: torch.Tensor, recovered: Rounding | None) -> torch.Tensor:
    """Return the ``_NEW`` tokens that follow a prompt [1, tokens]; its last token is always computed."""
    cache, found = _prefix(model, prompt[:, :-1], recovered), prompt[:, -1:]
    tokens = []
    for _ in range(_NEW):
        found = model(found, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(found)
    return torch.cat(tokens, 1)[0]


class _Exact(NamedTuple):
    """A text [1, tokens], the exact log-probabilities behind its tokens, and the tokens that follow its first half."""

    ids: torch.Tensor
    logits: torch.Tensor
    greedy: torch.Tensor


def _exact(model: Any, ids: torch.Tensor) -> _Exact:
    return _Exact(ids, _logits(model, ids, None), _greedy(model, ids[:, : ids.shape[1] // 2], None))


def _compare(model: Any, texts: list[_Exact], recovered: Rounding | None = None) -> dict[str, Any]:
    """Compare a model with the exact one."""
    divergences: list[float] = []
    surprises: tuple[list[float], list[float]] = ([], [])
    agreeing = 0
    greedy: list[int] = []
    for text in texts:
        found = _logits(model, text.ids, recovered)
        wanted = text.logits[-len(found) :]
        divergences += (wanted.exp() * (wanted - found)).sum(-1).tolist()
        agreeing += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        following = text.ids[0, -len(found) + 1 :, None]
        for surprise, of in zip(surprises, (wanted, found), strict=True):
            surprise += (-of[:-1].gather(1, following)).flatten().tolist()
        same = (text.greedy == _greedy(model, text.ids[:, : text.ids.shape[1] // 2], recovered)).int()
        greedy.append(int(same.cumprod(0).sum()))
    of_exact, of_model = (torch.tensor(surprise).mean().exp().item() for surprise in surprises)
    return {
        "positions": len(divergences),
        "kl_mean": round(statistics.mean(divergences), 6),
        "kl_largest": round(max(divergences), 4),
        "argmax_agreement": round(agreeing / len(divergences), 4),
        "perplexity": round(of_model, 4),
        "perplexity_exact": round(of_exact, 4),
        "greedy": greedy,
        "greedy_length": _NEW,
    }


def _modules(path: Path, names: Sequence[str]) -> list[torch.Tensor]:
    """Return the beginnings of modules of Python's standard library as tokens [1, tokens] of the model in ``path``."""
    tokenizer, folder = AutoTokenizer.from_pretrained(path), Path(sysconfig.get_paths()["stdlib"])
    return [torch.tensor([tokenizer((folder / f"{name}.py").read_text())["input_ids"][:_LENGTH]]) for name in names]


def _texts(path: Path, file: str | None) -> list[torch.Tensor]:
    """Return pieces of text as tokens [1, tokens] of the model in ``path``."""
    if file is None:
        return _modules(path, _FILES)
    ids = AutoTokenizer.from_pretrained(path)(Path(file).read_text())["input_ids"][: len(_FILES) * _LENGTH]
    pieces = [ids[start : start + _LENGTH] for start in range(0, len(ids), _LENGTH)]
    return [torch.tensor([piece]) for piece in pieces if len(piece) >= min(len(ids), _LENGTH)]


def _sample(path: Path, file: str | None) -> torch.Tensor | None:
    """Return pieces of another text as tokens [pieces, tokens]; None: the file has no more text."""
    if file is None:
        return torch.cat(_modules(path, _OTHER_FILES))
    ids = AutoTokenizer.from_pretrained(path)(Path(file).read_text())["input_ids"][len(_FILES) * _LENGTH :]
    pieces = torch.tensor(ids[: len(ids) // _LENGTH * _LENGTH]).view(-1, _LENGTH)[: len(_OTHER_FILES)]
    return pieces if len(pieces) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pagewise-demo")
    parser.add_argument("--text", help="a text file; by default modules of Python's standard library")
    parser.add_argument("--only", nargs="+", help="what to compare, such as fp8; by default everything")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    path = resolve_model(args.model)
    formats, texts = Formats(path, _sample(path, args.text)), _texts(path, args.text)
    unknown = set(args.only or ()) - {*formats.make, *_TIERS}
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} are none of {', '.join([*formats.make, *_TIERS])}")
    numbers: dict[str, Any] = {}
    with torch.inference_mode():
        exact = formats.exact()
        compared = [_exact(exact, ids) for ids in texts]
        for name in [*formats.make, *_TIERS]:
            if args.only is None or name in args.only:
                model = exact if name in _TIERS else formats.make[name]()
                numbers[name] = _compare(model, compared, _TIERS.get(name))
                row = "  ".join(f"{key} {value}" for key, value in numbers[name].items() if key != "greedy_length")
                print(f"{name:>24}  {row}", flush=True)
    if args.json:
        write_record(args.json, numbers)


if __name__ == "__main__":
    main()
