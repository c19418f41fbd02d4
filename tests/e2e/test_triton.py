"""The Triton kernels behind the real endpoint: interpreted, they serve the same tokens as the PyTorch executor."""

import json
import urllib.request

import pytest

from benchmarks.processes import Served, serving

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\nclass "]


def complete(server: Served, prompt: str, **fields: object) -> str:
    body = json.dumps({"model": "pagewise-demo", "prompt": prompt, "max_tokens": 3, "temperature": 0} | fields)
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=110) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


@pytest.mark.long
def test_the_interpreted_kernels_serve_what_pytorch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    answers = []
    for kernels in ("torch", "triton"):
        options = ("--device", "cpu", "--kernels", kernels, "--num-blocks", "64", "--max-num-seqs", "4", "--no-profile")
        with serving(*options) as server:
            assert any(f"kernels: {kernels}, by --kernels" in line for line in server.output), "it says which at start"
            answers.append(
                [complete(server, prompt) for prompt in PROMPTS]
                + [complete(server, PROMPTS[0], temperature=1.0, seed=5, top_p=0.9)]
            )
    assert answers[0] == answers[1]
