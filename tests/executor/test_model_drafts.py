"""Drafts by models that come with the served model: the tokens are the same without drafts, whatever is accepted."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.issued_step import IssuedStep
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.profile import dummy_prefill, profile_run
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.protocol import NewSequence, ProposingStepPlan, StepPlan, Welcome, pack_int32s, unpack_int32s
from pagewise_shared.sampling import SamplingParams
from safetensors.torch import load_file, save_file

from tests.cpu_kernels import need_cpu_kernels
from tests.draft_models import (
    APART,
    BEHIND,
    build_cycling,
    build_head,
    build_mtp,
    quantise_head,
    reference_of_head,
)
from tests.drafting import draft_always
from tests.executor.drafted_requests import requests
from tests.executor.driver import outputs_of, request, run_requests
from tests.executor.exact_inputs import keep_inputs_exact
from tests.executor.runners import build_runner
from tests.four_bit_checkpoints import FORMS as FOUR_BITS
from tests.four_bit_checkpoints import build_four_bits
from tests.lora_adapters import build_adapter, read, with_adapter
from tests.model_builders import build_model
from tests.quantised_checkpoints import FORMS, OracleLinear, build_quantised

MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3})


def eagle3(head: Path, most: int = 3) -> str:
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": most})


@pytest.fixture
def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


def check(runner: ModelRunner, *, every_memory: bool = False, max_tokens: int = 20) -> None:
    """Outputs are those without drafts, in chunks of other prompts, and when sequences lose their blocks."""
    num_blocks = (80 if runner.info.groups else 112) // runner.info.block_size
    small = {"num_blocks": num_blocks, "recovery": "swap"}
    for memory in ({}, small, small | {"recovery": "recompute"}) if every_memory else (small,):
        settings: dict[str, Any] = {"arrive_every": 3, "max_num_batched_tokens": 24, "max_num_seqs": 4} | memory
        run_requests(runner, asked := requests(max_tokens), **settings, proposes=False)
        scheduler, _ = run_requests(runner, found := requests(max_tokens), **settings)
        assert outputs_of(found) == outputs_of(asked)
        assert scheduler.features.drafts.num_drafts > 10
        assert scheduler.features.drafts.num_accepted_tokens > 0
        assert (scheduler.num_preemptions > 0) == bool(memory)


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)])
def test_a_head_that_is_hardly_ever_right_changes_no_token(tmp_path: Path, kernels: str) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    build_model("llama", tmp_path / "model", seed=5)
    build_head(tmp_path / "head")
    runner = build_runner(tmp_path / "model", kernels=kernels, speculative_config=eagle3(tmp_path / "head"))
    check(runner, every_memory=kernels == "torch")


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("glm4_moe", "cpu"),
        pytest.param("glm4_moe", "torch", marks=pytest.mark.long),
        pytest.param("deepseek_v3", "cpu", marks=pytest.mark.long),
        ("qwen3_next", "cpu"),
        *(pytest.param(family, "torch", marks=pytest.mark.long) for family in ("qwen3_next", "qwen3_5")),
    ],
)
def test_an_mtp_layer_changes_no_token(tmp_path: Path, family: str, kernels: str) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    build_mtp(family, tmp_path)
    check(build_runner(tmp_path, kernels=kernels, speculative_config=MTP), every_memory=kernels == "torch")


@pytest.mark.long
@pytest.mark.usefixtures("drafts_always")
def test_windows_of_the_model_and_a_head_that_sees_all_tokens_go_together(tmp_path: Path) -> None:
    build_model("gemma3", tmp_path / "model", seed=5, num_hidden_layers=6, num_key_value_heads=2, head_dim=12)
    build_head(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    runner = build_runner(tmp_path / "model", kernels="torch", speculative_config=eagle3(tmp_path / "head"))
    assert runner.info.groups
    check(runner, every_memory=True)


@pytest.fixture(scope="module")
def cycling(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, list[int]]:
    """A model with a head that always knows the likeliest token, and the token behind each token."""
    path = tmp_path_factory.mktemp("cycling")
    following = build_cycling(path / "model", path / "head")
    return build_runner(path / "model", speculative_config=eagle3(path / "head", 4)), following


def cycle(following: list[int], token: int, count: int) -> list[int]:
    return [token := following[token] for _ in range(count)]


@pytest.mark.usefixtures("drafts_always")
def test_a_head_that_is_always_right_gives_five_tokens_a_step(cycling: tuple[ModelRunner, list[int]]) -> None:
    runner, following = cycling
    asked = [request([number, 9, 3 + number], 41, f"r{number}") for number in range(3)]
    scheduler, steps = run_requests(runner, asked)
    assert outputs_of(asked) == [cycle(following, 3 + number, 41) for number in range(3)]
    drafts = scheduler.features.drafts
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens
    # One token by the prompt, and then five a step, or fewer in the first ones, which have no blocks ahead.
    assert len(steps) <= 2 + 40 // 5


@pytest.mark.usefixtures("drafts_always")
def test_states_of_a_hybrid_model_are_those_behind_the_kept_tokens(tmp_path: Path) -> None:
    """Each token is one of two, so the MTP layer is often right, and sequences lose their states and get them back."""
    build_mtp("qwen3_next", tmp_path, seed=2)
    runner = build_runner(tmp_path, kernels="torch", speculative_config=MTP)

    def asked() -> list[Request]:
        kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.5, "seed": 5}, {}]
        return [request([n, 9, 3 + n], 41, f"r{n}", allowed=(20 + n, 90), **kind) for n, kind in enumerate(kinds)]

    run_requests(runner, expected := asked(), proposes=False)
    scheduler, _ = run_requests(runner, found := asked(), num_blocks=11, max_num_batched_tokens=24)
    assert outputs_of(found) == outputs_of(expected)
    assert 25 < scheduler.features.drafts.num_accepted_tokens < scheduler.features.drafts.num_draft_tokens
    assert scheduler.num_preemptions > 0


def started(runner: ModelRunner, proposals: list[int], **sampling: Any) -> tuple[list[int], list[int]]:
    """Let row 0 compute a prompt of three tokens; returns the token behind it, and what is proposed."""
    runner.reset(Welcome(1, 4, 64))
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    states = ((0, pack_int32s([9])),) * (len(runner.info.groups) > 1)
    new = NewSequence(0, pack_int32s([5, 6, 7]), 3, 0, pack_int32s([0, 1]), params, windows=states)
    plan = ProposingStepPlan(1, 1, joined=(new,), chunks=((0, 3),), proposals=pack_int32s(proposals))
    return answer(runner, plan)


def answer(runner: ModelRunner, plan: StepPlan) -> tuple[list[int], list[int]]:
    result = runner.execute(plan).result()
    return unpack_int32s(result.tokens).tolist(), unpack_int32s(result.proposed).tolist()


def test_what_is_proposed_goes_on_behind_the_tokens_that_are_kept(cycling: tuple[ModelRunner, list[int]]) -> None:
    runner, following = cycling
    drawn, proposed = started(runner, [0, 3])
    assert [*drawn, *proposed] == cycle(following, 7, 4)
    for right in (2, 0):
        known = drawn[-1]
        draft = [*proposed[:right], *(one + 1 for one in proposed[right:])]
        plan = ProposingStepPlan(1, 2 if right else 3, drafts=((0, pack_int32s(draft)),), proposals=pack_int32s([0, 3]))
        drawn, proposed = answer(runner, plan)
        drawn = drawn[: right + 1]
        assert [*drawn, *proposed] == cycle(following, known, right + 4)
    # Two blocks of eight: slots of tokens behind the tenth are known.
    drawn, proposed = answer(runner, ProposingStepPlan(1, 4, proposals=pack_int32s([0, 16])))
    assert proposed == [*cycle(following, drawn[-1], 9), *[-1] * 7]


@pytest.mark.parametrize(
    ("proposals", "why"),
    [
        ([0, 17], "does not get there"),
        ([0, -1], "does not get there"),
        ([1, 1], "does not get there"),
        ([0, 1, 0, 1], "two proposals"),
        ([0], "pairs"),
    ],
)
def test_impossible_proposals_are_refused(
    cycling: tuple[ModelRunner, list[int]], proposals: list[int], why: str
) -> None:
    with pytest.raises(InvalidPlanError, match=why):
        started(cycling[0], proposals)


def test_prompts_that_begin_in_the_cache_have_the_kv_of_the_draft_model(tmp_path: Path) -> None:
    build_model("llama", tmp_path / "model", seed=5)
    build_head(tmp_path / "head", seed=4)
    runner = build_runner(tmp_path / "model", speculative_config=eagle3(tmp_path / "head"))
    runner.reset(Welcome(1, 4, 64))
    prompt = pack_int32s([number * 7 % 199 for number in range(21)])

    def joins(row: int, computed: int, blocks: list[int]) -> NewSequence:
        return NewSequence(row, prompt, 21, computed, pack_int32s(blocks), SamplingParams(temperature=0.0))

    # In chunks, of which the first two complete nothing.
    first = ((0, 5), (0, 0)), ((0, 9), (0, 0)), ((0, 7), (0, 3))
    for step, (chunk, proposal) in enumerate(first, 1):
        new = (joins(0, 0, [0, 1, 2]),) if step == 1 else ()
        plan = ProposingStepPlan(1, step, joined=new, chunks=(chunk,), proposals=pack_int32s(proposal))
        expected = answer(runner, plan)
    new = joins(1, 16, [0, 1, 3])
    again = ProposingStepPlan(1, 4, left=(0,), joined=(new,), chunks=((1, 5),), proposals=pack_int32s([1, 3]))
    assert answer(runner, again) == expected


@pytest.mark.parametrize("kernels", [{"kernels": "torch"}, {"kernels": "cpu", "kv_dtype": "int8"}])
def test_bits_that_memory_held_before_change_neither_tokens_nor_drafts_behind_a_gap(
    tmp_path: Path, kernels: dict[str, Any]
) -> None:
    if kernels["kernels"] == "cpu":
        need_cpu_kernels()
    build_mtp("qwen3_next", tmp_path, seed=2)
    runner = build_runner(tmp_path, speculative_config=MTP, **kernels)
    prompt, greedy = pack_int32s(range(5, 15)), SamplingParams(temperature=0.0)
    new = NewSequence(0, prompt, 10, 0, pack_int32s([0, 1]), greedy, windows=((0, pack_int32s([9])),))
    found = []
    for bits in (0, 255):  # which is no number in any type
        runner.reset(Welcome(1, 4, 64))
        runner._pool.regions[0][0, 1:] = bits
        first = answer(runner, StepPlan(1, 1, joined=(new,), chunks=((0, 10),)))
        found.append((first, answer(runner, ProposingStepPlan(1, 2, proposals=pack_int32s([0, 3])))))
    assert found[0] == found[1]


@pytest.mark.usefixtures("drafts_always")
def test_adapters_and_drafts_go_together(tmp_path: Path) -> None:
    build_model("llama", tmp_path / "model", seed=5)
    build_head(tmp_path / "head")
    adapter = read(build_adapter(tmp_path / "model", tmp_path / "adapter"))
    runner = build_runner(
        tmp_path / "model", speculative_config=eagle3(tmp_path / "head"), enable_lora=True, max_lora_rank=16
    )

    def asked() -> list[Request]:
        return [with_adapter(one, [5, 6, 7, number], 16, f"r{number}") for number, one in enumerate([adapter, None])]

    run_requests(runner, expected := asked(), proposes=False)
    scheduler, _ = run_requests(runner, found := asked())
    assert outputs_of(found) == outputs_of(expected)
    assert scheduler.features.drafts.num_drafts > 10


def test_steps_are_measured_and_warmed_up_with_drafts(
    cycling: tuple[ModelRunner, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, runner = list[StepPlan](), cycling[0]

    def execute(plan: StepPlan, issue: Callable[[StepPlan], IssuedStep] = runner.execute) -> IssuedStep:
        plans.append(plan)
        return issue(plan)

    monkeypatch.setattr(runner, "execute", execute)
    profile_run(runner, 70)
    for drafts in (True, False):
        dummy_prefill(runner, 0, 4, number=2, drafts=drafts)
    assert [unpack_int32s(plan.proposals).tolist() for plan in plans] == [[0, 1], [0, 1, 1, 1], []]


def test_proposals_need_a_draft_model(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    with pytest.raises(InvalidPlanError, match="no draft model"):
        started(build_runner(tmp_path), [0, 1])


@torch.inference_mode()
def reference_of_mtp(whole: Any, path: Path, ids: list[int], count: int) -> list[int]:
    """The tokens that an MTP layer proposes behind ``ids``, by the modules of transformers, all positions at once."""
    number = len(whole.model.layers) - 1
    weights, block = load_file(path / "model.safetensors"), whole.model.layers[number]
    whole.model.layers, whole.config.num_hidden_layers = whole.model.layers[:number], number
    apart = "mtp.fc.weight" in weights
    prefix, names = ("mtp.", APART) if apart else (f"model.layers.{number}.", BEHIND)
    before, beside, project, behind = (weights[f"{prefix}{name}.weight"] for name in names)
    hidden = whole.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    known, found, eps = ids[1:], list[int](), whole.config.rms_norm_eps

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + apart, eps)

    for _ in range(count):
        embedded = whole.model.embed_tokens(torch.tensor([known]))
        x = torch.nn.functional.linear(torch.cat([norm(embedded, before), norm(hidden, beside)], -1), project)
        places = torch.arange(len(known))[None]
        rotation = whole.model.rotary_emb(x, places)
        out = norm(block(x, position_embeddings=rotation, position_ids=places, attention_mask=None), behind)
        found.append(int(whole.lm_head(out)[0, -1].argmax()))
        known, hidden = [*known, found[-1]], torch.cat([hidden, out[:, -1:]], 1)
    return found


@pytest.mark.parametrize(
    "family",
    ["glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe", pytest.param("qwen3_5", marks=pytest.mark.long)],
)
def test_an_mtp_layer_proposes_what_it_predicts(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = build_mtp(family, tmp_path, seed=2)
    if family == "qwen3_5_moe":
        as_part(tmp_path)
    drawn, proposed = started(build_runner(tmp_path, speculative_config=MTP), [0, 3])
    assert "not used" not in caplog.text
    whole.set_attn_implementation("sdpa")
    assert proposed == reference_of_mtp(whole, tmp_path, [5, 6, 7, *drawn], 3)


def as_part(path: Path) -> None:
    """Let a checkpoint be one of a multimodal model of which it is the text."""
    weights, file = load_file(path / "model.safetensors"), path / "config.json"
    named = {name.replace("model.", "model.language_model.", 1): one for name, one in weights.items()}
    save_file(named | {"model.visual.weight": torch.ones(2)}, path / "model.safetensors", {"format": "pt"})
    text = json.loads(file.read_text())
    whole = {"model_type": text["model_type"].removesuffix("_text"), "tie_word_embeddings": False, "text_config": text}
    if "quantization_config" in text:
        whole["quantization_config"] = text.pop("quantization_config")
    file.write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("family", "build", "kept"),
    [
        ("glm4_moe", partial(build_quantised, FORMS["fp8 per channel"]), ()),
        ("deepseek_v3", partial(build_quantised, FORMS["fp8 of deepseek"]), ()),
        ("qwen3_next", partial(build_quantised, FORMS["fp8 of deepseek"]), ("mtp.layers.0",)),
        ("qwen3_5", partial(build_quantised, FORMS["int8 per channel"]), ("re:mtp.*",)),
        ("qwen3_5", partial(build_four_bits, FOUR_BITS["compressed-tensors"]), ()),
    ],
)
def test_mtp_layers_of_quantised_checkpoints_propose_what_they_predict(
    family: str, build: Any, kept: tuple[str, ...], tmp_path: Path
) -> None:
    """``kept``: the entries for the MTP layer among those that are not quantised."""
    whole = build_mtp(family, tmp_path, seed=2, build=build)
    if kept:
        keep_as_floats(tmp_path, whole.model.layers[-1], "mtp.layers.0", kept)
    if family == "qwen3_5":
        as_part(tmp_path)
    drawn, proposed = started(build_runner(tmp_path, kernels="torch", speculative_config=MTP), [0, 3])
    whole.set_attn_implementation("sdpa")
    assert proposed == reference_of_mtp(whole, tmp_path, [5, 6, 7, *drawn], 3)


def test_the_mtp_layer_of_a_gguf_file_proposes_what_it_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    need_cpu_kernels()
    from tests.gguf_models import EXPERTS, build_gguf, round_weights, rounded

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    keep_inputs_exact(monkeypatch)

    def build(family: str, path: Path, num_hidden_layers: int, **settings: Any) -> Any:
        return build_mtp(family, path, seed=2, build=partial(build_model, **settings))

    whole = build_gguf(
        tmp_path / "m.gguf", "glm4_moe", "Q8_0", {"nextn_predict_layers": 1}, build=build, **EXPERTS["glm4_moe"]
    )
    file = tmp_path / "original" / "model.safetensors"
    weights = load_file(file)
    name = f"model.layers.{len(whole.model.layers) - 1}.eh_proj.weight"
    weights[name] = rounded(weights[name], "Q8_0")
    save_file(weights, file, {"format": "pt"})
    round_weights(whole, "Q8_0")
    drawn, proposed = started(build_runner(tmp_path / "m.gguf", speculative_config=MTP), [0, 3])
    assert proposed == reference_of_mtp(whole, file.parent, [5, 6, 7, *drawn], 3)


def keep_as_floats(path: Path, block: torch.nn.Module, prefix: str, entries: Sequence[str]) -> None:
    """Let the files have the linear layers of ``block`` as they were before they were quantised."""
    weights, file = load_file(path / "model.safetensors"), path / "config.json"
    for name, linear in block.named_modules(prefix=prefix):
        if isinstance(linear, OracleLinear):
            for end in linear.stored():
                del weights[f"{name}.{end}"]
            weights[f"{name}.weight"] = linear.weight.detach().contiguous()
            linear.form, linear.exact = FORMS["fp8 weights"], linear.weight.detach().double()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    settings = json.loads(file.read_text())
    config = settings["quantization_config"]
    key = "ignore" if "ignore" in config else "modules_to_not_convert"
    config[key] = [*config.get(key, ()), *entries]
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize("kernels", ["cpu", "torch", pytest.param("triton", marks=pytest.mark.long)])
def test_a_head_proposes_what_it_predicts(tmp_path: Path, kernels: str) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    model = build_model("llama", tmp_path / "model", seed=5)
    build_head(tmp_path / "head", seed=4)
    runner = build_runner(tmp_path / "model", kernels=kernels, speculative_config=eagle3(tmp_path / "head", 4))
    assert "KV of its draft model" in runner.info.no_segments
    drawn, proposed = started(runner, [0, 4])
    assert proposed == reference_of_head(model, tmp_path / "head", [5, 6, 7, *drawn], 4)


@pytest.mark.parametrize("form", [FOUR_BITS["compressed-tensors"], FOUR_BITS["awq"], FORMS["fp8 weights"]])
def test_a_quantised_head_of_a_quantised_model_proposes_what_it_predicts(tmp_path: Path, form: Any) -> None:
    model = build_four_bits(FOUR_BITS["compressed-tensors"], tmp_path / "model", seed=5)
    build_head(tmp_path / "head", seed=4)
    exact = quantise_head(tmp_path / "head", form)
    runner = build_runner(tmp_path / "model", kernels="torch", speculative_config=eagle3(tmp_path / "head", 4))
    drawn, proposed = started(runner, [0, 4])
    assert proposed == reference_of_head(model, exact, [5, 6, 7, *drawn], 4)
