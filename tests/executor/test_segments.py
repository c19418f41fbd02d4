"""Segments of prompts: their tokens equal transformers' with the same attention, with any blocks cached or lost."""

import random
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.scheduling.prefill_set import PrefillSet
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.segments import ALL_BEFORE, make_segments, mark_segments

from tests.core_requests import change, make_request
from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.references import reference, segments_reference
from tests.executor.runners import build_runner
from tests.model_builders import EAGER, FAMILIES, VOCAB_SIZE, build_model, model_fixture

WITHOUT_ROPE = {"opt", "gpt2"}

model_path = model_fixture("llama", seed=5)


def segmented(
    pieces: list[tuple[list[int], bool]],
    max_tokens: int,
    name: str,
    *,
    root: int = ALL_BEFORE,
    boundary: int = 0,
    n: int = 1,
) -> Request:
    """A request whose prompt is these pieces one after the other. Of each: whether it is a segment."""
    prompt: list[int] = []
    ranges = []
    for tokens, is_segment in pieces:
        if is_segment:
            ranges.append((len(prompt), len(prompt) + len(tokens)))
        prompt += tokens
    made = request(prompt, max_tokens, name, n=n)
    made.segments = make_segments(len(prompt), ranges, root=root, boundary=boundary)
    mark_segments(made.prompt_token_ids, made.segments)
    return made


def rag_requests(rng: random.Random, count: int, longest: int = 14) -> list[Request]:
    """Prompts of a few documents in any order, between other tokens, behind one of two roots or none."""

    def tokens(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    documents = [tokens(length) for length in (24, 7, 33, 16)]
    roots = [tokens(11), tokens(16), []]
    made = []
    for number in range(count):
        pieces = [(rng.choice(roots), False)]
        for document in rng.sample(documents, rng.randrange(1, 4)):
            pieces += [(document, True), (tokens(rng.choice([0, 0, 3])), False)]
        pieces.append((tokens(rng.randrange(1, 9)), False))
        options = {
            "root": rng.choice([ALL_BEFORE, ALL_BEFORE, 0, min(5, len(pieces[0][0]))]),
            "boundary": rng.choice([0, 0, 5]),
        }
        made.append(segmented(pieces, rng.randrange(2, longest), f"r{number}", n=rng.choice([1, 1, 2]), **options))  # type: ignore[arg-type]
    return made


def load(path: Path) -> transformers.PreTrainedModel:
    attention = "eager" if path.name in EAGER else "sdpa"
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention
    ).eval()


def check(runner: ModelRunner, model: transformers.PreTrainedModel, requests: list[Request], **options: object) -> int:
    """Serve requests; their tokens must equal transformers'. Returns how often sequences were preempted."""
    with torch.inference_mode():
        expected = [segments_reference(model, asked) for asked in requests]
    scheduler, _ = run_requests(runner, requests, **options)  # type: ignore[arg-type]
    for asked, tokens in zip(requests, expected, strict=True):
        for sequence in asked.sequences:
            assert sequence.output_token_ids.tolist() == tokens, asked.segments
    assert scheduler.features.segments.num_moved > 0
    assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks
    return scheduler.num_preemptions


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITHOUT_ROPE))
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    build_model(family, path := tmp_path / family, seed=7)
    runner = build_runner(path, kernels="torch", block_size=8, layer_groups=False)
    check(runner, load(path), rag_requests(random.Random(5), 10), max_num_batched_tokens=40, arrive_every=2)


@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3"])
def test_latents_are_moved(family: str, tmp_path: Path) -> None:
    """A key has a part that is rotated: pairs of it are neighbours in one family, in the other not."""
    build_model(family, tmp_path, seed=7)
    runner = build_runner(tmp_path, block_size=8)
    check(runner, load(tmp_path), rag_requests(random.Random(5), 4), max_num_batched_tokens=40)


def test_moved_keys_in_eight_bits_are_scaled_anew(model_path: Path) -> None:
    """The first token after a segment has nearly the log-probability that it has with exact KV."""
    need_cpu_kernels()
    found = []
    for kv_dtype in ("int8", "auto"):
        runner = build_runner(model_path, kernels="cpu", kv_dtype=kv_dtype)
        document = [*range(40, 64)]
        asked = [segmented([([7] * n, False), (document, True), ([9], False)], 1, f"r{n}") for n in (3, 5)]
        for one in asked:
            change(one, sampling=msgspec.structs.replace(one.params.sampling, logprobs=0))
        scheduler, outputs = run_requests(runner, asked, max_num_seqs=1)
        assert scheduler.features.segments.num_moved > 0
        found.append([entry.logprob for out in outputs for entry in out.logprobs.values()])
        runner.close()
    assert len(found[1]) == 2
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.parametrize("family", sorted(WITHOUT_ROPE))
def test_models_without_rope_say_that_they_have_no_segments(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)
    runner = build_runner(tmp_path, kernels="torch")
    assert runner.info.no_segments == "the keys of its layer 0 are not rotated by their position (RoPE)"


def test_a_segment_means_something_else_than_its_tokens(tmp_path: Path) -> None:
    model = build_model("llama", tmp_path, seed=7)
    rng = random.Random(1)
    differing = 0
    for asked in rag_requests(rng, 6):
        with torch.inference_mode():
            plain = reference(
                load(tmp_path), [[t & (2**28 - 1) for t in asked.prompt_token_ids]], [asked.max_tokens], "cpu"
            )
            differing += plain[0] != segments_reference(model.eval(), asked)
    assert differing >= 3, "a model this dull would prove nothing"


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute", "both"])
def test_in_too_little_memory_the_tokens_stay_the_same(model_path: Path, mode: RecoveryMode) -> None:
    """Originals are evicted and computed again, or come back from the host; sequences are preempted and go on."""
    requests = rag_requests(random.Random(len(mode)), 24, longest=50)
    for number in range(0, 24, 2):  # short prompts with long outputs take the room that was left
        requests.insert(number, request([3 + number] * 3, 130, f"other{number}"))
    runner = build_runner(model_path)
    preempted = check(
        runner, load(model_path), requests, num_blocks=38, max_num_batched_tokens=40, arrive_every=2, recovery=mode
    )
    assert preempted


def test_what_is_found_gives_the_same_tokens_as_what_is_computed(model_path: Path) -> None:
    rng = random.Random(3)
    runner, model = build_runner(model_path), load(model_path)
    asked = rag_requests(rng, 6)
    check(runner, model, asked + [again(one) for one in asked], max_num_batched_tokens=64, arrive_every=12)


def again(asked: Request) -> Request:
    return make_request(
        f"{asked.request_id}-again",
        asked.prompt_token_ids,
        asked.max_tokens,
        asked.params.sampling,
        n=asked.params.n,
        segments=asked.segments,
    )


def test_tokens_stay_the_same_with_page_tables(model_path: Path) -> None:
    options = {"kernels": "torch", "kv_mapping": "mmu", "kv_layout": "blocks", "block_size": 64, "max_num_seqs": 16}
    runner = build_runner(model_path, **options)
    check(runner, load(model_path), rag_requests(random.Random(2), 8), max_num_batched_tokens=40, arrive_every=2)


@pytest.mark.long
def test_the_triton_kernels_give_the_same_tokens(model_path: Path, device: torch.device) -> None:
    runner = build_runner(model_path, device.type, kernels="triton", host_memory=None)
    assert runner._graphs is not None
    runner._graphs.mixed.runs = True  # from static buffers, as CUDA graphs do
    model = load(model_path).to("cpu")
    check(runner, model, rag_requests(random.Random(9), 2), max_num_batched_tokens=40, arrive_every=2)


def test_a_chunk_may_end_inside_of_a_segment(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where the room ends there, or where loaded blocks begin: in too little memory, with recovery by
    "both", also without this patch."""
    whole, rng = PrefillSet._size, random.Random(1)

    def size(self: PrefillSet, sequence: RequestSequence, budget: int) -> int:
        taken, block = whole(self, sequence, budget), self._kv.block_size
        start = sequence.num_scheduled_tokens
        ends = list(range(start - start % block + block, start + taken, block))
        return rng.choice(ends) - start if ends and rng.random() < 0.7 else taken

    monkeypatch.setattr(PrefillSet, "_size", size)
    runner = build_runner(model_path, "cpu", kernels="torch")
    check(runner, load(model_path), rag_requests(random.Random(0), 16), max_num_batched_tokens=40, arrive_every=2)
