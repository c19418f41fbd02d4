"""Trains the bundled demo model: a small Llama on the sources of Python's standard library.

    python examples/demo_model/train.py --out shared/pagewise_shared/demo_model --minutes 25

Everything it needs is on the machine: the sources come from the running interpreter (PSF licence), the tokenizer is
trained on them, and the model starts from random weights. It prints its progress to standard error.
"""

import argparse
import ast
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pagewise_shared.model_files import resolve_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES)]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
CONTEXT = 512
BATCH = 8


@dataclass
class Corpus:
    """Token ids to train on and to validate on, one flat tensor each."""

    train: torch.Tensor
    validation: torch.Tensor


def source_files() -> list[Path]:
    """The standard library's modules, without tests and site-packages, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Of ``encodings`` most is tables of characters: nothing to learn from them.
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "turtledemo", "encodings"}
    return [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]


def read_sources() -> list[str]:
    """The text of every module that is valid UTF-8."""
    texts = []
    for path in source_files():
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def chats(text: str, rng: random.Random) -> Iterator[str]:
    """Short conversations made of a module's functions: a request, and the function as the answer."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            source = ast.get_source_segment(text, node)
            if source is None or not 60 < len(source) < 1500:
                continue
            ask = rng.choice(
                [
                    f"Write a function named {node.name}.",
                    f"Write a Python function {node.name}",
                    f"Complete: def {node.name}(",
                    f"Show me {node.name} in Python",
                ]
            )
            system = "<|system|>\nYou write Python.<|end|>\n" if rng.random() < 0.3 else ""
            yield f"{system}<|user|>\n{ask}<|end|>\n<|assistant|>\n{source}<|end|>\n"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Every 40th module is for validation only; the others are for training (tokenizer and model)."""
    return [text for number, text in enumerate(texts) if number % 40], texts[::40]


def build_corpus(
    kept: list[str], held_out: list[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Corpus:
    """Modules and conversations, shuffled, and the held-out modules."""
    documents = [END_OF_TEXT + text for text in kept]
    for text in kept:
        documents += [END_OF_TEXT + chat for chat in chats(text, rng) if rng.random() < 0.35]
    rng.shuffle(documents)

    def encode(parts: list[str]) -> torch.Tensor:
        # Without offsets this takes a fraction of the time of calling the tokenizer.
        ids = [token for part in tokenizer.backend_tokenizer.encode_batch_fast(parts) for token in part.ids]
        return torch.tensor(ids, dtype=torch.int32)

    return Corpus(encode(documents), encode([END_OF_TEXT + text for text in held_out]))


def build_model(hidden: int, layers: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights. ``hidden``: numbers of a hidden state, a multiple of 128."""
    torch.manual_seed(seed)
    ends = [SPECIAL_TOKENS.index(token) for token in (END_OF_TEXT, END_OF_TURN)]  # the first ids are theirs
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=5 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=ends[0],
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    return LlamaForCausalLM(config)


def grow(small: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
    """Let a model compute nearly the same as a smaller one.

    Its hidden states have each number several times. A little noise lets the copies learn different things. Its further
    layers add nothing to the hidden states at first.
    """
    own, times = small.state_dict(), model.config.hidden_size // small.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name not in own:
                weight.mul_(0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            elif weight.ndim == 1:
                weight.copy_(own[name].repeat(times) / (times if name == "model.norm.weight" else 1))
            else:
                copies = (1, times) if "embed" in name else (times, times)
                weight.mul_(0.1).add_(own[name].repeat(copies) / copies[0])


def sample(data: torch.Tensor, context: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """``rows`` random windows of ``context`` + 1 tokens."""
    starts = torch.randint(0, len(data) - context - 1, (rows,), generator=generator)
    return torch.stack([data[start : start + context + 1] for start in starts.tolist()]).long()


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a batch [rows, context + 1], nats per token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.inference_mode()
def validation_loss(model: LlamaForCausalLM, data: torch.Tensor, rows: int = 32) -> float:
    """Loss over evenly spaced windows of the held-out modules."""
    step = max(1, (len(data) - CONTEXT - 1) // rows)
    starts = range(0, len(data) - CONTEXT - 1, step)
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).long()
    parts = torch.split(windows, 16)
    return sum(loss_of(model, part).item() * len(part) for part in parts) / len(windows)


def learning_rate(progress: float, peak: float) -> float:
    """Short warm-up, then linear to zero; ``progress`` from 0 to 1."""
    return peak * min(1.0, progress / 0.02, (1 - progress) / 0.98 + 1e-3)


def optimizers_of(model: torch.nn.Module, embedding: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model with this embedding."""
    # Muon for the layers' matrices learns faster per token than AdamW, which keeps the embedding and the norms.
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([embedding, *vectors], lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(model: LlamaForCausalLM, corpus: Corpus, minutes: float, peak: float, seed: int) -> None:
    """Train for ``minutes`` of wall time; the learning rate follows the clock, so that it always ends at zero."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = optimizers_of(model, model.get_input_embeddings().get_parameter("weight"))
    began, step, smooth = time.monotonic(), 0, math.nan
    while (progress := (time.monotonic() - began) / (minutes * 60)) < 1:
        # Now and then a window of the full length, so that every position has been seen.
        context = MAX_POSITIONS if step % 8 == 7 else CONTEXT
        batch = sample(corpus.train, context, BATCH * CONTEXT // context, generator)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, peak)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0:
            report(f"step {step:5d}  {progress:6.1%}  {step * BATCH * CONTEXT:>10d} tokens  train loss {smooth:.4f}")
        if step % 500 == 0:
            report(f"step {step:5d}  validation loss {validation_loss(model, corpus.validation):.4f}")
    report(f"done: {step} steps, {step * BATCH * CONTEXT} tokens, final train loss {smooth:.4f}")


def report(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="train the bundled demo model")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=25, help="wall time to train for")
    parser.add_argument("--hidden", type=int, default=256, help="numbers of a hidden state, a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--grown-from", help="a smaller model to begin with, or its directory (default: random weights)"
    )
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)  # noqa: S311
    texts = read_sources()
    kept, held_out = hold_out(texts)
    grown_from = args.grown_from and resolve_model(args.grown_from)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(grown_from) if grown_from else train_tokenizer(kept)
    corpus = build_corpus(kept, held_out, tokenizer, rng)
    model = build_model(args.hidden, args.layers, args.seed)
    if grown_from:
        grow(LlamaForCausalLM.from_pretrained(grown_from), model)
    report(f"python {sys.version.split()[0]}, torch {torch.__version__}, {args.threads} threads, seed {args.seed}")
    report(f"{len(texts)} modules, {len(corpus.train)} training and {len(corpus.validation)} validation tokens")
    report(f"{sum(p.numel() for p in model.parameters())} parameters")
    train(model, corpus, args.minutes, args.peak, args.seed)
    model.bfloat16()
    report(f"final validation loss, in bfloat16: {validation_loss(model, corpus.validation):.4f}")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
