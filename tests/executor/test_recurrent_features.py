"""Options of requests with recurrent layers: beams, grammars, seeds and several outputs; and adapters."""

import random
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
import torch
import transformers
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.errors import AdapterError

from tests.executor.driver import request, run_requests
from tests.executor.parity import check_beams, check_mixture
from tests.executor.runners import build_runner
from tests.lora_adapters import build_adapter, read
from tests.model_builders import build_model
from tests.structured import EOS, Reference, build_structured_model, random_grammar, text_of

FAMILIES = ("granitemoehybrid", "qwen3_5", "nemotron_h", "lfm2", "kimi_linear")

families = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.long] * (one != FAMILIES[0])) for one in FAMILIES]
)


@families
def test_beams_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=11)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    runner = build_runner(tmp_path, block_size=4, num_blocks=600, threads=1)
    check_beams(runner, model, 4, 2, False)
    runner.close()


@families
def test_everything_mixed_at_random(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path / "model", seed=7)
    disk = str(tmp_path / "disk")
    check_mixture(tmp_path / "model", FAMILIES.index(family), block_size=3, host_memory="300KiB", disk_cache=disk)


def drawn(count: int) -> tuple[list[Request], list[object]]:
    """Requests that are sampled with seeds, with and without grammars, some with several outputs."""
    rng, requests, checks = random.Random(4), list[Request](), list[object]()
    for number in range(count):
        grammar, check = random_grammar(rng)
        plain, n = number % 3 == 2, rng.choice([1, 1, 3])
        asked = {"temperature": 1.0, "seed": number} | ({} if plain else {"grammar": grammar, "stop_token_ids": (EOS,)})
        requests.append(request([5, 9, 12, 30, *[5 + number] * (8 * number)], 25, f"m{number}", n=n, **asked))
        checks += [None if plain else check] * n
    return requests, checks


@families
def test_grammars_and_seeds_in_too_little_memory(family: str, tmp_path: Path) -> None:
    build_structured_model(tmp_path, seed=3, family=family)
    runner = build_runner(tmp_path, host_memory="300KiB", threads=1)
    alone, checks = drawn(7)
    for one in alone:
        run_requests(runner, [one])
    together, _ = drawn(7)
    run_requests(runner, together, num_blocks=14, max_num_batched_tokens=11, recovery="swap", arrive_every=2)
    sequences = [(one, sequence) for one in together for sequence in one.sequences]
    assert [[one.output_token_ids for one in made.sequences] for made in together] == [
        [one.output_token_ids for one in made.sequences] for made in alone
    ]
    for (one, sequence), check in zip(sequences, checks, strict=True):
        if callable(check):
            tokens = sequence.output_token_ids.tolist()
            assert Reference(tmp_path, one.params.sampling.grammar).holds(tokens)
            assert sequence.finish_reason == "length" or check(text_of(tmp_path, tokens))
    runner.close()


def test_adapters_of_recurrent_modules_are_refused_by_name(tmp_path: Path) -> None:
    build_model("lfm2", model := tmp_path / "model")
    runner = build_runner(model, enable_lora=True)
    refused = build_adapter(model, tmp_path / "refused", target_modules=["q_proj", "in_proj"])
    with pytest.raises(AdapterError, match=r"conv\.in_proj, which is no linear layer of this model"):
        runner._adapters._host.read(read(refused), ())  # type: ignore[union-attr]
    runner.close()
