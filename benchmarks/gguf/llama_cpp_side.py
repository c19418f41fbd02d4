"""Runs llama.cpp, in an environment that has llama-cpp-python and not Pagewise; ``compare`` starts it.

Of one JSON object on standard input: ``quantise``: files to make from ``source``, by the names of formats. ``file`` and
``texts``: the tokens of texts, the log-probabilities behind each of their first tokens, and greedy tokens.
"""

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np


def quantise(source: str, files: dict[str, str]) -> None:
    """Make files in other formats from one in float16."""
    for form, file in files.items():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form}")
        if llama_cpp.llama_model_quantize(source.encode(), file.encode(), ctypes.byref(params)):
            raise SystemExit(f"llama.cpp cannot make {file}")


def evaluate(file: str, texts: list[str], length: int, new: int, target: str) -> list[dict[str, Any]]:
    """Write the logits behind the first ``length`` tokens of each text to files that begin with ``target``.

    Returns the tokens, and the ``new`` greedy ones behind the first half.
    """
    model = llama_cpp.Llama(file, n_ctx=length + new, logits_all=True, verbose=False, n_threads=2)
    found = []
    for number, text in enumerate(texts):
        ids = model.tokenize(text.encode(), add_bos=True, special=False)
        model.reset()
        model.eval(ids[:length])
        np.save(f"{target}{number}.npy", model.scores[:length].astype(np.float32))
        model.reset()
        model.eval(ids[: length // 2])
        greedy: list[int] = []
        for at in range(length // 2, length // 2 + new):
            greedy.append(int(model.scores[at - 1].argmax()))
            model.eval(greedy[-1:])
        found.append({"ids": ids, "greedy": greedy})
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    if "quantise" in asked:
        quantise(asked["source"], asked["quantise"])
        print("[]")
    else:
        print(json.dumps(evaluate(**asked)))


if __name__ == "__main__":
    main()
