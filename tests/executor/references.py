"""What transformers generates for the same prompts."""

import torch
import transformers
from pagewise_shared.sampling import BeamParams


def reference(
    model: transformers.PreTrainedModel, prompts: list[list[int]], lengths: list[int], device: str
) -> list[list[int]]:
    """What ``generate()`` makes of each prompt, greedily, with exactly as many tokens as ``lengths`` says."""
    outputs = []
    for prompt, max_tokens in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt], device=device)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def beam_reference(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    max_tokens: int,
    beam: BeamParams,
    n: int,
    ends: list[int],
) -> list[list[int]]:
    """The ``n`` best beams that ``generate()`` finds, each up to and including one of the tokens ``ends``."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        num_beams=beam.width,
        num_return_sequences=n,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
    )
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        outputs.append(row[:stop])
    return outputs
