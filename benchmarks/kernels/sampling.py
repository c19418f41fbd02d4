"""From logits to tokens: sampling, penalties, log-probabilities."""

import torch
from pagewise_kernels.logprobs import token_logprobs
from pagewise_kernels.penalties import penalise
from pagewise_kernels.sampling import SamplingTensors, sample

from benchmarks.kernels.bench import Bench


def sampling(bench: Bench) -> None:
    rows, vocab = (2, 300) if bench.smoke else (256, 151_936)
    logits = torch.randn(rows, vocab, device=bench.device).bfloat16()
    index = torch.arange(rows, device=bench.device)
    for name, top_k, top_p in (("greedy or plain", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9)):
        parameters = SamplingTensors(
            torch.ones(rows, device=bench.device),
            torch.full((rows,), top_k, dtype=torch.int32, device=bench.device),
            torch.full((rows,), top_p, device=bench.device),
            torch.zeros(rows, device=bench.device),
            index,
        )

        def run(parameters: SamplingTensors = parameters) -> object:
            return sample(logits, parameters, index.int(), index)

        bench.bytes(f"sample, {name}", "pagewise", run, logits.numel() * 2)
    bench.bytes("softmax and sort", "torch", lambda: logits.float().softmax(-1).sort(-1), logits.numel() * 2)
    _penalties(bench, logits)
    _logprobs(bench, logits)


def _penalties(bench: Bench, logits: torch.Tensor) -> None:
    rows, vocab = logits.shape
    device = bench.device
    counts = torch.randint(0, 3, (rows, vocab), dtype=torch.int32, device=device)
    in_prompt = torch.rand(rows, vocab, device=device) < 0.01
    index = torch.arange(rows, dtype=torch.int32, device=device)
    repetition, presence, frequency = (torch.full((rows,), value, device=device) for value in (1.1, 0.5, 0.2))

    def ours() -> object:
        return penalise(logits, index, counts, in_prompt, repetition=repetition, presence=presence, frequency=frequency)

    def theirs() -> object:
        value, said = logits.float(), counts > 0
        by = repetition[:, None]
        value = torch.where(said | in_prompt, torch.where(value > 0, value / by, value * by), value)
        return value - frequency[:, None] * counts - presence[:, None] * said

    moved = logits.numel() * (2 + 4 + 1 + 4)  # logits, counts, whether in the prompt; the result
    bench.bytes("penalties", "pagewise", ours, moved)
    bench.bytes("penalties", "torch", theirs, moved)


def _logprobs(bench: Bench, logits: torch.Tensor) -> None:
    rows, vocab = logits.shape
    tokens = torch.randint(0, vocab, (rows,), device=bench.device)

    def theirs() -> object:
        wide = logits.float()
        own = wide.gather(1, tokens[:, None])
        return own - wide.logsumexp(1, keepdim=True), (wide > own).sum(1) + 1

    moved = logits.numel() * 2
    bench.bytes("token log-probabilities", "pagewise", lambda: token_logprobs(logits, tokens), moved)
    bench.bytes("token log-probabilities", "torch", theirs, moved)
