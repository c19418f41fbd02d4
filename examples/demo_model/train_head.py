"""Trains an EAGLE-3 head that drafts for the bundled demo model, or for another one that ``train.py`` has trained.

    python examples/demo_model/train_head.py --out DIR
    pagewise serve --speculative-config '{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}'

First the model continues pieces of the text on which it was trained, because it drafts texts that a model writes. The
head learns the probabilities that the model gives to the tokens of text and continuation. In each step it continues its
own predictions for three tokens, as in drafting (Li et al., 2025, call this training-time test).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pagewise import LLM, SamplingParams
from pagewise_shared.model_files import resolve_model
from safetensors.torch import save_file
from torch import nn
from train import (  # type: ignore[import-not-found] # it is in the folder of this script
    CONTEXT,
    END_OF_TEXT,
    hold_out,
    learning_rate,
    optimizers_of,
    read_sources,
    report,
    sample,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

AHEAD = 3
"""Tokens that the head drafts in training."""
_EPS = 1e-6


class Norm(nn.Module):
    """A root mean square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [.., size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, _EPS)


class Head(nn.Module):
    """The head, with the names of its weights in files. ``model``: whose head and last norm it begins with.

    ``targets`` [n]: the tokens that it knows.
    """

    def __init__(self, model: LlamaForCausalLM, targets: torch.Tensor) -> None:
        super().__init__()
        config: Any = model.config
        size, inner, self.dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.kv_heads, self.theta = config.num_attention_heads, config.num_key_value_heads, 10_000.0
        layers = config.num_hidden_layers
        self.taken = (layers // 4, layers // 2, layers - 1)
        """The layers of the model whose inputs the head takes."""
        self.fc = _linear(len(self.taken) * size, size)
        layer: Any = nn.Module()
        attention: Any = nn.Module()
        mlp: Any = nn.Module()
        attention.q_proj = _linear(2 * size, self.heads * self.dim)
        attention.k_proj, attention.v_proj = (_linear(2 * size, self.kv_heads * self.dim) for _ in range(2))
        attention.o_proj = _linear(self.heads * self.dim, size)
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = _linear(size, inner), _linear(size, inner), _linear(inner, size)
        layer.self_attn, layer.mlp = attention, mlp
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm = (Norm(size) for _ in range(3))
        self.midlayer: Any = layer
        self.norm, self.lm_head = Norm(size), _linear(size, len(targets))
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(size).repeat(1, len(self.taken)) / len(self.taken))
            self.lm_head.weight.copy_(model.lm_head.weight[targets])
            self.norm.weight.copy_(model.model.norm.weight)

    def attend(self, both: torch.Tensor, before: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Attend with entries [rows, tokens, 2 · hidden].

        ``before``: K and V of the passes before this one, to which it appends its own. The first pass makes entries
        from the model's states. In each further one, the entry of a token continues the ones of the same token.
        """
        layer = self.midlayer.self_attn
        rows, count = both.shape[:2]
        q, k, v = (
            project(both).view(rows, count, -1, self.dim).transpose(1, 2)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = self._rotated(q, len(before)), self._rotated(k, len(before))
        groups = self.heads // self.kv_heads
        before.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (first, values), *own = before
        scores = (q @ first.transpose(-1, -2)).masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True) for k, _ in own)], -1)
        weights = (scores.float() * self.dim**-0.5).softmax(-1)
        out = weights[..., :count] @ values
        for number, (_, v) in enumerate(own):
            out = out + weights[..., count + number, None] * v
        attended: torch.Tensor = layer.o_proj(out.transpose(1, 2).reshape(rows, count, -1))
        return attended

    def _rotated(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        half = self.dim // 2
        positions = torch.arange(offset, offset + x.shape[2])
        angles = positions[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, before: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states of entries, from embeddings and hidden states. ``before``: see ``attend``."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        hidden = hidden + self.attend(both, before)
        x, mlp = layer.post_attention_layernorm(hidden), layer.mlp
        hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        return self.lm_head(self.norm(hidden)), hidden


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def losses(
    model: LlamaForCausalLM, head: Head, batch: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """Return the loss of a batch [rows, tokens]. Also return for each token of a draft the share that equals the
    model's likeliest token, in the second half of each row, where the tokens before it are the row's."""
    count, shares, before = batch.shape[1] - AHEAD, list[float](), list[tuple[torch.Tensor, torch.Tensor]]()
    with torch.no_grad():
        output = model(input_ids=batch, use_cache=False, output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer] for layer in head.taken], -1)
        taught = output.logits.float().softmax(-1)[..., targets]
        likeliest = output.logits.argmax(-1)
        embedded = model.model.embed_tokens(batch)
    hidden, total = head.fc(states)[:, :count], torch.zeros(())
    for step in range(AHEAD):
        span = slice(step + 1, step + 1 + count)
        logits, hidden = head(embedded[:, span], hidden, before)
        total = total - 0.8**step * (taught[:, span] * logits.float().log_softmax(-1)).sum(-1).mean()
        found = targets[logits.argmax(-1)] == likeliest[:, span]
        shares.append(found[:, count // 2 :].float().mean().item())
    return total, shares


def save(head: Head, targets: torch.Tensor, model: LlamaForCausalLM, path: Path) -> None:
    """Save the head as a folder."""
    config = model.config
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in head.state_dict().items()}
    weights["d2t"] = targets - torch.arange(len(targets))
    save_file(weights, path / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": head.heads, "num_key_value_heads": head.kv_heads, "head_dim": head.dim,
        "num_hidden_layers": 1, "rms_norm_eps": _EPS, "vocab_size": config.vocab_size, "rope_theta": head.theta,
        "draft_vocab_size": len(targets), "eagle_config": {"eagle_aux_hidden_state_layer_ids": head.taken},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokens_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the tokens of texts, one behind the other."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([END_OF_TEXT + text for text in texts])
    return torch.tensor([token for one in encoded for token in one.ids])


def continued(llm: LLM, text: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``rows`` pieces of a text, each with the model's continuation, as long as the piece."""
    pieces = [row.tolist() for row in sample(text, CONTEXT - 1, rows, generator)]
    outputs = llm.generate(pieces, SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True))
    return torch.tensor([
        [*piece, *output.outputs[0].token_ids] for piece, output in zip(pieces, outputs, strict=True)
    ])  # fmt: skip


def _listed(shares: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="train an EAGLE-3 head for the demo model, or one like it")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--model", default="pagewise-demo", help="the model, or its directory")
    parser.add_argument("--rows", type=int, default=600, help="pieces of text that the model continues, to train on")
    parser.add_argument("--minutes", type=float, default=25, help="wall time to train for, behind these continuations")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens that the head knows, the most frequent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    path, generator = resolve_model(args.model), torch.Generator().manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    texts = [tokens_of(texts, tokenizer) for texts in hold_out(read_sources())]
    with LLM(args.model, threads=args.threads, max_num_seqs=64) as llm:
        kept, held_out = (
            continued(llm, text, rows, generator) for text, rows in zip(texts, (args.rows, 16), strict=True)
        )
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).requires_grad_(False)
    model.train(mode=False)
    counts = torch.bincount(kept.flatten(), minlength=model.config.vocab_size)
    targets = counts.argsort(descending=True)[: args.vocabulary].sort().values
    covered = counts[targets].sum().item() / kept.numel()
    head = Head(model, targets)
    optimizers = optimizers_of(head, head.lm_head.weight)
    size = sum(weight.numel() for weight in head.parameters())
    report(f"{size} parameters; {covered:.1%} of the text are tokens that the head knows")
    began, step = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / (args.minutes * 60)) < 1:
        batch = kept[torch.randint(len(kept), (1,), generator=generator)]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(progress, peak=2e-3)
        with torch.autocast("cpu", torch.bfloat16):  # which halves the time of a step
            loss, shares = losses(model, head, batch, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            report(f"step {step:5d}  {progress:6.1%}  loss {loss.item():.3f}  right drafts: {_listed(shares)}")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = [losses(model, head, row[None], targets)[1] for row in held_out]
    shares = [sum(column) / len(found) for column in zip(*found, strict=True)]
    report(f"done: {step} steps; behind held-out text, the model's likeliest token: {_listed(shares)}")
    save(head, targets, model, args.out)


if __name__ == "__main__":
    main()
