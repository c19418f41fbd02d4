"""Trains an EAGLE-3 head that drafts for the bundled demo model.

    python examples/demo_model/train_head.py --out DIR --steps 2000
    pagewise serve --speculative-config '{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}'

The head learns the probabilities that the model gives to tokens of the text on which the model was trained. In
each step it continues its own predictions for three tokens, as in drafting (Li et al., 2025, call this training-time
test), except that a predicted token does not attend to the predicted tokens before it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pagewise_shared.model_files import resolve_model
from safetensors.torch import save_file
from torch import nn
from train import (  # type: ignore[import-not-found] # it is in the folder of this script
    BATCH,
    CONTEXT,
    END_OF_TEXT,
    hold_out,
    learning_rate,
    read_sources,
    report,
    sample,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

AHEAD = 3
"""Tokens that the head drafts in training."""
TAKEN = (1, 2, 3)
"""The layers of the model whose inputs the head takes."""
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
        self.fc = _linear(len(TAKEN) * size, size)
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
            self.fc.weight.copy_(torch.eye(size).repeat(1, len(TAKEN)) / len(TAKEN))
            self.lm_head.weight.copy_(model.lm_head.weight[targets])
            self.norm.weight.copy_(model.model.norm.weight)

    def attend(
        self, both: torch.Tensor, known: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Attend with entries [rows, tokens, 2 · hidden]; returns the output and their K and V.

        ``known``: K and V of the entries that were made from the model's states; None: ``both`` has these entries.
        """
        layer = self.midlayer.self_attn
        rows, count = both.shape[:2]
        q, k, v = (
            project(both).view(rows, count, -1, self.dim).transpose(1, 2)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = self._rotated(q), self._rotated(k)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if known is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # each entry attends to the model's entries before it, and to itself
            scale, before = self.dim**-0.5, torch.ones(count, count, dtype=torch.bool).tril(-1)
            scores = (q @ known[0].transpose(-1, -2) * scale).masked_fill(~before, float("-inf"))
            weights = torch.cat([scores, (q * k).sum(-1, keepdim=True) * scale], -1).softmax(-1)
            out = weights[..., :-1] @ known[1] + weights[..., -1:] * v
        return layer.o_proj(out.transpose(1, 2).reshape(rows, count, -1)), (k, v)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.dim // 2
        angles = torch.arange(x.shape[2])[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, known: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return logits, hidden states, and K and V of entries, from embeddings and hidden states."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        attended, kv = self.attend(both, known)
        hidden = hidden + attended
        x, mlp = layer.post_attention_layernorm(hidden), layer.mlp
        hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        return self.lm_head(self.norm(hidden)), hidden, kv


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def losses(
    model: LlamaForCausalLM, head: Head, batch: torch.Tensor, targets: torch.Tensor, *, count_found: bool
) -> tuple[torch.Tensor, list[float]]:
    """Return the loss of a batch [rows, tokens]. If ``count_found``, also return for each token of a draft the share
    that equals the model's likeliest token, where the tokens before it are the text's."""
    count, shares = batch.shape[1] - AHEAD, list[float]()
    with torch.no_grad():
        output = model(input_ids=batch, use_cache=False, output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer] for layer in TAKEN], -1)
        taught = output.logits.float().softmax(-1)[..., targets]
        embedded = model.model.embed_tokens(batch)
    hidden, known, total = head.fc(states)[:, :count], None, torch.zeros(())
    for step in range(AHEAD):
        span = slice(step + 1, step + 1 + count)
        logits, hidden, kv = head(embedded[:, span], hidden, known)
        known = known or kv
        total = total - 0.8**step * (taught[:, span] * logits.float().log_softmax(-1)).sum(-1).mean()
        if count_found:
            found = targets[logits.argmax(-1)] == output.logits[:, span].argmax(-1)
            shares.append(found.float().mean().item())
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
        "draft_vocab_size": len(targets), "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAKEN},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokens_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the tokens of texts, one behind the other."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([END_OF_TEXT + text for text in texts])
    return torch.tensor([token for one in encoded for token in one.ids])


def _listed(shares: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="train an EAGLE-3 head for the bundled demo model")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=2000, help="steps of 1024 tokens")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens that the head knows, the most frequent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    path = resolve_model("pagewise-demo")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).requires_grad_(False)
    model.train(mode=False)
    kept, held_out = (tokens_of(texts, tokenizer) for texts in hold_out(read_sources()))
    counts = torch.bincount(kept, minlength=model.config.vocab_size)
    targets = counts.argsort(descending=True)[: args.vocabulary].sort().values
    covered = counts[targets].sum().item() / len(kept)
    head, generator = Head(model, targets), torch.Generator().manual_seed(args.seed)
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    report(f"{sum(map(torch.numel, matrices))} parameters; {covered:.1%} of the text are tokens that the head knows")
    for step in range(1, args.steps + 1):
        batch = sample(kept, CONTEXT // 2, BATCH // 2, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / args.steps, peak=2e-3)
        with torch.autocast("cpu", torch.bfloat16):  # which halves the time of a step
            loss, shares = losses(model, head, batch, targets, count_found=step % 20 == 0)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if shares:
            report(f"step {step:5d}  loss {loss.item():.3f}  the model's likeliest token: {_listed(shares)}")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        batch = sample(held_out, CONTEXT, BATCH, generator)
        shares = losses(model, head, batch, targets, count_found=True)[1]
    report(f"done: {args.steps} steps; on held-out text, the model's likeliest token: {_listed(shares)}")
    save(head, targets, model, args.out)


if __name__ == "__main__":
    main()
