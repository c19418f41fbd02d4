"""Pagewise and llama.cpp on the same GGUF files, which llama.cpp has made, beside the weights of the files in float32.

    python -m benchmarks.gguf.compare --llama-cpp PYTHON [--json FILE]

The texts are modules of Python's standard library, which the demo model was trained on. ``exact`` is transformers with
the weights of the file in float32. Both round inputs to eight bits: Pagewise by 16 or 32 inputs, llama.cpp by 32 or
256. The divergence is that of Kullback and Leibler from ``exact``, at each position of the texts. ``greedy``: how many
tokens that ``pagewise.LLM`` generates llama.cpp generates as well, before the first that differs.

PYTHON is an interpreter that has llama-cpp-python:

    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF" pip install llama-cpp-python==0.3.36
"""

import argparse
import json
import os
import statistics
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from pagewise import LLM, SamplingParams
from pagewise_executor.models.gguf_file import OpenedGguf, tensors_of
from pagewise_executor.models.gguf_weight import FORMATS, in_four_bits, unpack
from pagewise_executor.models.packed_linear import GroupedLinear, Int4Linear
from pagewise_shared.model_files import resolve_model
from transformers import AutoModelForCausalLM

from benchmarks.gguf.files import write_checkpoint
from benchmarks.record import record_file, write_record

FORMS = ("Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0")
_FILES = ("ast", "bisect", "calendar", "csv", "dataclasses", "difflib", "fractions", "heapq", "queue", "textwrap")
_LENGTH, _NEW = 512, 64


def _of_llama_cpp(interpreter: str, **asked: Any) -> Any:
    side = Path(__file__).with_name("llama_cpp_side.py")
    done = subprocess.run(
        [interpreter, str(side)], input=json.dumps(asked), capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _with_our_layers(model: Any, folder: Path, file: Path) -> Any:
    """Return a model of transformers with the linear layers that compute here."""
    opened = OpenedGguf(folder / file.name)
    for name, tensor in tensors_of(folder / file.name).items():
        # The head of this model is tied to the embedding.
        place = "lm_head" if "embed_tokens" in name else name.removesuffix(".weight")
        if tensor.kind in FORMATS:
            weight = unpack(opened.get_tensor(name), tensor.kind)
            layer = Int4Linear(in_four_bits(weight), None) if tensor.kind == "Q4_0" else GroupedLinear(weight, None)
            model.set_submodule(place, layer)
    return model


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> list[float]:
    wanted, found = exact.log_softmax(-1), other.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).tolist()


def _same(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@torch.inference_mode()
def compare(interpreter: str, file: Path, texts: list[str]) -> dict[str, Any]:
    """Return how far both are from the weights of a file, and from each other."""
    folder = resolve_model(str(file))
    target = str(file.with_suffix("")) + "-"
    theirs = _of_llama_cpp(interpreter, file=str(file), texts=texts, length=_LENGTH, new=_NEW, target=target)
    kind: Any = AutoModelForCausalLM
    exact, ours = (kind.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval() for _ in range(2))
    _with_our_layers(ours, folder, file)
    divergences: dict[str, list[float]] = {"pagewise": [], "llama.cpp": [], "between": []}
    agreeing = 0
    for number, text in enumerate(theirs):
        ids = torch.tensor([text["ids"][:_LENGTH]])
        wanted, own = exact(ids).logits[0], ours(ids).logits[0]
        other = torch.from_numpy(np.load(f"{target}{number}.npy"))
        divergences["pagewise"] += _divergence(wanted, own)
        divergences["llama.cpp"] += _divergence(wanted, other)
        divergences["between"] += _divergence(other, own)
        agreeing += int((own.argmax(-1) == other.argmax(-1)).sum())
    with LLM(str(file), device="cpu", kv_memory="256MiB") as server:
        params = SamplingParams(temperature=0, max_tokens=_NEW, min_tokens=_NEW)
        prompts: Any = [{"prompt_token_ids": text["ids"][: _LENGTH // 2]} for text in theirs]
        made = [output.outputs[0].token_ids for output in server.generate(prompts, params, use_tqdm=False)]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers: dict[str, Any] = {
        f"kl_mean, {name}": round(statistics.mean(each), 7) for name, each in divergences.items()
    }
    numbers |= {f"kl_largest, {name}": round(max(each), 5) for name, each in divergences.items()}
    return {
        "bytes": file.stat().st_size,
        "positions": len(divergences["between"]),
        **numbers,
        "argmax_agreement": round(agreeing / len(divergences["between"]), 4),
        "greedy": [_same(list(own), text["greedy"]) for own, text in zip(made, theirs, strict=True)],
        "greedy_length": _NEW,
        "equal_tokens_of_texts": all(
            tokenizer.encode(text).ids == one["ids"] for text, one in zip(texts, theirs, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", required=True, metavar="PYTHON", help="an interpreter with llama-cpp-python")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    texts = [(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text() for name in _FILES]
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # where the folders of GGUF models are made
        source, files = Path(folder) / "F16.gguf", {form: Path(folder) / f"{form}.gguf" for form in args.only}
        write_checkpoint(resolve_model("pagewise-demo"), source)
        _of_llama_cpp(args.llama_cpp, source=str(source), quantise={form: str(file) for form, file in files.items()})
        for form, file in files.items():
            numbers[form] = compare(args.llama_cpp, file, texts)
            for key, value in numbers[form].items():
                print(f"{form:>8} {key:>24} {value}")
    if args.json:
        write_record(args.json, numbers, llama_cpp_python="0.3.36")


if __name__ == "__main__":
    main()
