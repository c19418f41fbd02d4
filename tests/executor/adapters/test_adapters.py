"""Adapters in the batches of a real model, against PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.adapters.host import HostAdapters
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.adapters import AdapterFiles, open_adapter, read_adapter
from pagewise_shared.errors import AdapterError
from pagewise_shared.protocol import Adapter
from pagewise_shared.sampling import BeamParams
from pagewise_shared.segments import make_segments, mark_segments
from safetensors.torch import load_file, save_file

from tests.core_requests import change
from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import drive, run_requests
from tests.executor.references import segments_reference
from tests.executor.runners import build_runner
from tests.lora_adapters import ALL, build_adapter, greedy, peft_model, quietly, read, with_adapter
from tests.model_builders import build_model, model_fixture

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 4},
    "stabilised": {
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
        "alpha_pattern": {"o_proj": 3},
    },
}


def check(
    runner: ModelRunner,
    model: Path,
    folders: dict[str, Path],
    count: int = 12,
    asked: int = 2,
    size: int = 27,
    **driving: Any,
) -> None:
    """Run requests with each adapter and without, mixed, and compare tokens and log-probabilities with PEFT's."""
    adapters: dict[str, Adapter | None] = {name: read(path, name) for name, path in folders.items()}
    requests = [
        with_adapter(
            adapters.get(name), list(range(3 + number, 3 + size + number)), count, f"{name} {number}", logprobs=0
        )
        for number, name in enumerate([*folders, "none"] * asked)
    ]
    scheduler, outputs = run_requests(runner, requests, **{"max_num_batched_tokens": 24} | driving)
    found: dict[str, list[float]] = {}
    for output in outputs:
        for sequence, entry in output.logprobs.items():
            found.setdefault(sequence.request.request_id, []).append(entry.logprob)
    references = {name: peft_model(model, folders.get(name)) for name in [*folders, "none"]}
    for request in requests:
        name = request.request_id.split()[0]
        tokens, logprobs = greedy(references[name], request.prompt_token_ids.tolist(), count)
        assert request.sequences[0].output_token_ids.tolist() == tokens, request.request_id
        assert found[request.request_id] == pytest.approx(logprobs, abs=2e-4)
    if "num_blocks" in driving:
        assert scheduler.num_preemptions


llama = model_fixture("llama")


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("adapters")
    return {
        name: build_adapter(llama, path / name, seed, **given) for seed, (name, given) in enumerate(SETTINGS.items())
    }


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"kernels": "cpu", "dtype": "float32"}])
def test_a_mixed_batch_is_what_peft_computes_for_each_adapter(
    options: dict[str, Any], llama: Path, folders: dict[str, Path]
) -> None:
    check(build_runner(llama, enable_lora=True, max_loras=3, **options), llama, folders)


def test_on_the_cpu_layers_are_one_call_in_steps_without_adapters_alone(
    llama: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cpu_kernels()
    single: list[FusedDecoderLayer] = []
    original = FusedDecoderLayer.forward

    def forward(self: FusedDecoderLayer, *args: Any) -> torch.Tensor:
        single.append(self)
        return original(self, *args)

    monkeypatch.setattr(FusedDecoderLayer, "forward", forward)
    runner = build_runner(llama, enable_lora=True, kernels="cpu", dtype="float32")
    single.clear()
    for name in (None, "plain", None):
        adapter = read(folders[name], name) if name else None
        request = with_adapter(adapter, [3, 4, 5, 6, 7], 6, "r")
        run_requests(runner, [request])
        expected, _ = greedy(peft_model(llama, folders.get(name or "")), [3, 4, 5, 6, 7], 6)
        assert request.sequences[0].output_token_ids.tolist() == expected
        assert bool(single) is (adapter is not None)
        single.clear()


def test_adapters_that_take_turns_in_one_slot_and_lose_their_blocks_go_on_as_if_nothing_had_happened(
    llama: Path, folders: dict[str, Path]
) -> None:
    runner = build_runner(llama, enable_lora=True, max_loras=2, max_cpu_loras=2)
    check(runner, llama, folders, asked=3, num_blocks=14, count=20)


def test_all_outputs_of_a_request_have_its_adapter(llama: Path, folders: dict[str, Path]) -> None:
    runner = build_runner(llama, enable_lora=True)
    request = with_adapter(read(folders["plain"]), [3, 4, 5, 6, 7], 6, "r")
    change(request, n=3)
    beams = with_adapter(read(folders["plain"]), [3, 4, 5, 6, 7], 6, "beams")
    change(beams, beam=BeamParams(1, 1.0, early_stopping=False), n=1)
    run_requests(runner, [request, beams])
    expected, _ = greedy(peft_model(llama, folders["plain"]), [3, 4, 5, 6, 7], 6)
    outputs = [*request.sequences, *beams.sequences]
    assert [one.output_token_ids.tolist() for one in outputs] == [expected] * 4


def test_segments_belong_to_an_adapter(llama: Path, folders: dict[str, Path]) -> None:
    """The KV that one adapter has computed for a segment is not moved for a request with another adapter."""
    runner = build_runner(llama, enable_lora=True, max_loras=2)
    document, requests = list(range(40, 70)), []
    for number, name in enumerate(["plain", "attention", "plain", "attention"]):
        made = with_adapter(read(folders[name]), [*range(3, 9 + number), *document, 9, 10, 11], 5, f"{name} {number}")
        made.segments = make_segments(len(made.prompt_token_ids), [(6 + number, 36 + number)], root=0)
        mark_segments(made.prompt_token_ids, made.segments)
        requests.append(made)
    scheduler, _ = run_requests(runner, requests, arrive_every=1000)
    assert scheduler.features.segments.num_found > 0
    for made in requests:
        with quietly():
            merged = peft_model(llama, folders[made.request_id.split()[0]]).merge_and_unload()  # type: ignore[operator]
        assert made.sequences[0].output_token_ids.tolist() == segments_reference(merged, made), made.request_id


@pytest.mark.interpreted
@pytest.mark.parametrize("is_static", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_triton_kernels_compute_the_same(is_static: bool, llama: Path, folders: dict[str, Path]) -> None:
    """Kernels for decodes always read static buffers, as CUDA graphs do; kernels for chunks if ``is_static``."""
    runner = build_runner(llama, enable_lora=True, max_loras=2, kernels="triton", host_memory=None)
    assert runner._graphs is not None
    runner._graphs.mixed.runs = is_static
    check(runner, llama, {name: folders[name] for name in ("attention", "stabilised")}, count=2, asked=1, size=5)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", ["c_attn", "mlp.c_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("qwen2_moe", ["q_proj", "o_proj", "shared_expert.up_proj", "shared_expert.down_proj"]),
        pytest.param("qwen3_moe", ["q_proj", "k_proj", "v_proj", "o_proj"], marks=pytest.mark.long),
        pytest.param("glm4_moe", ["q_proj", "o_proj"], marks=pytest.mark.long),
        *(pytest.param(name, ["q_a_proj", "o_proj"], marks=pytest.mark.long) for name in ("glm4_moe_lite", "mistral4")),
        pytest.param("minimax_m2", ["q_proj", "v_proj"], marks=pytest.mark.long),
    ],
)
def test_layers_that_are_not_fused_have_adapters_too(family: str, targets: list[str], tmp_path: Path) -> None:
    build_model(family, tmp_path / "model")
    fan_in = {"fan_in_fan_out": True} if family == "gpt2" else {}
    folder = build_adapter(tmp_path / "model", tmp_path / "one", target_modules=targets, **fan_in)
    runner = build_runner(tmp_path / "model", enable_lora=True)
    check(runner, tmp_path / "model", {"one": folder}, count=6, asked=1)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma3", ALL),
        *(
            pytest.param(name, ["q_proj", "o_proj", "down_proj"], marks=pytest.mark.long)
            for name in ("gemma4", "gemma4_moe", "ministral")
        ),
        pytest.param("gpt_oss", ["q_proj", "k_proj", "v_proj", "o_proj"], marks=pytest.mark.long),
        pytest.param("llama4", ["q_proj", "v_proj", "o_proj"], marks=pytest.mark.long),
        pytest.param("olmo3", ALL, marks=pytest.mark.long),
        ("lfm2", ["q_proj", "v_proj", "w1", "w2"]),
        pytest.param("qwen3_5", ["q_proj", "v_proj", "down_proj"], marks=pytest.mark.long),
    ],
)
def test_models_with_several_groups_of_layers_have_adapters_too(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    """In so little memory that sequences are preempted and windows go to the host."""
    build_model(family, model := tmp_path / "model", seed=7)
    folders = {name: build_adapter(model, tmp_path / name, i, target_modules=targets) for i, name in enumerate("ab")}
    runner = build_runner(model, enable_lora=True, max_loras=2)
    assert runner.info.groups
    check(runner, model, folders, asked=2, num_blocks=9, count=100 if family == "qwen3_5" else 30, recovery="swap")


def test_the_layer_that_latents_absorb_has_no_adapters(tmp_path: Path) -> None:
    """The up-projection of latents (MLA) is no linear layer of the model any more."""
    build_model("deepseek_v3", model := tmp_path / "model")
    runner = build_runner(model, enable_lora=True)
    served = build_adapter(model, tmp_path / "served", target_modules=["q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
    check(runner, model, {"served": served}, count=6, asked=1)
    refused = build_adapter(model, tmp_path / "refused", target_modules=["kv_b_proj"])
    with pytest.raises(AdapterError, match="kv_b_proj, which is no linear layer of this model"):
        runner._adapters._host.read(read(refused), ())  # type: ignore[union-attr]


def test_other_weights_under_an_old_name_use_nothing_of_the_old_kv(llama: Path, folders: dict[str, Path]) -> None:
    runner = build_runner(llama, enable_lora=True, max_loras=1)
    prompt = list(range(5, 45))
    old, new = read(folders["plain"], "name"), read(folders["stabilised"], "name")
    assert old.content != new.content
    first, second = (with_adapter(old, prompt, 4, name) for name in ("first", "second"))
    scheduler, _ = run_requests(runner, [first], max_num_batched_tokens=64)
    drive(runner, scheduler, [second])
    assert second.num_cached_tokens >= 32
    third = with_adapter(new, prompt, 4, "third")
    drive(runner, scheduler, [third])
    assert third.num_cached_tokens == 0
    assert (
        third.sequences[0].output_token_ids.tolist() == greedy(peft_model(llama, folders["stabilised"]), prompt, 4)[0]
    )
    plain = with_adapter(None, prompt, 4, "plain")
    drive(runner, scheduler, [plain])
    assert plain.num_cached_tokens == 0


def test_32_adapters_share_four_slots(llama: Path, tmp_path: Path) -> None:
    runner = build_runner(llama, enable_lora=True, max_loras=4, max_cpu_loras=8)
    folder = build_adapter(llama, tmp_path / "one", target_modules=["q_proj", "down_proj"])
    weights, adapters = (folder / "adapter_model.safetensors").read_bytes(), []
    for number in range(32):  # the last byte belongs to the last number of the last tensor
        copy = tmp_path / str(number)
        copy.mkdir()
        (copy / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
        (copy / "adapter_model.safetensors").write_bytes(weights[:-4] + bytes([number]) + weights[-3:])
        adapters.append(read(copy, f"adapter-{number}"))
    assert len({adapter.content for adapter in adapters}) == 32
    requests = [with_adapter(adapters[number % 32], list(range(3, 20)), 3, f"r{number}") for number in range(64)]
    scheduler, _ = run_requests(runner, requests, arrive_every=1)
    assert all(len(one.sequences[0].output_token_ids) == 3 for one in requests)
    slots = scheduler.features.adapters
    assert slots.num_loads >= 32
    assert slots.num_loads - slots.num_evictions == slots.num_resident == 4
    assert isinstance(host := runner._adapters._host, HostAdapters)  # type: ignore[union-attr]
    assert len(host._held) == 8


# ---- refused adapters --------------------------------------------------------------------------------


def edited(folder: Path, path: Path, **settings: Any) -> Path:
    """A copy of an adapter with other settings."""
    path.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    return path


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"something_new": True}, "something_new"),
        ({"r": 5}, "its configuration says 5"),
        ({"rank_pattern": {"(": 3}}, "no pattern"),
    ],
)
def test_what_adapters_ask_for_beyond_lora_is_refused_by_name(
    settings: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=said) as refused:
        read(edited(folders["plain"], tmp_path / "edited", **settings), "mine")
    assert "'mine'" in str(refused.value)


def _with_embeddings(model: Path, path: Path) -> Path:
    return build_adapter(model, path, target_modules=["embed_tokens"])


def _with_head(model: Path, path: Path) -> Path:
    return build_adapter(model, path, target_modules=["lm_head"])


def _with_large_rank(model: Path, path: Path) -> Path:
    return build_adapter(model, path, target_modules=["q_proj"], r=17)


def _with_dora(model: Path, path: Path) -> Path:
    edited(build_adapter(model, path / "dora", target_modules=["q_proj"], use_dora=True), path / "it", use_dora=False)
    return path / "it"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_with_embeddings, "of embeddings"),
        (_with_head, "of the head"),
        (_with_large_rank, "is 17, --max-lora-rank is 16"),
        (_with_dora, "lora_magnitude_vector is of DoRA"),
    ],
)
def test_weights_that_cannot_be_served_are_refused_by_name(
    make: Callable[[Path, Path], Path], said: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=said):
        read(make(llama, tmp_path / "adapter"))


def test_files_that_are_damaged_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="neither a directory nor a hub id"):
        read(tmp_path / "nothing")
    damaged = edited(folders["plain"], tmp_path / "damaged")
    weights = (damaged / "adapter_model.safetensors").read_bytes()
    for content, said in [
        (weights[:-1], "its header says"),
        (b"\xff" * 100, "truncated"),
        (b"\x02" + bytes(7) + b"[]", "no safetensors"),
    ]:
        (damaged / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(AdapterError, match=said):
            read(damaged)
    (damaged / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="cannot be read"):
        read(damaged)
    (damaged / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        read(damaged)


def failing(runner: ModelRunner, adapter: Adapter) -> str:
    """Why an executor does not load an adapter."""
    request: Request = with_adapter(adapter, [3, 4], 2, "r")
    with pytest.raises(AssertionError) as failed:
        run_requests(runner, [request])
    return str(failed.value)


def test_adapters_of_other_models_and_files_that_have_changed_are_refused_when_they_are_loaded(
    llama: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    runner = build_runner(llama, enable_lora=True)
    build_model("llama", tmp_path / "wide", intermediate_size=96)
    other = build_adapter(tmp_path / "wide", tmp_path / "other", target_modules=["down_proj"])
    assert "it is of another model" in failing(runner, read(other))
    build_model("gpt2", tmp_path / "gpt2")
    strange = build_adapter(tmp_path / "gpt2", tmp_path / "strange", target_modules=["c_attn"], fan_in_fan_out=True)
    assert "is no linear layer of this model" in failing(runner, read(strange))
    copy = edited(folders["plain"], tmp_path / "copy")
    adapter = read(copy)
    config = copy / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    assert "are not the registered ones" in failing(runner, adapter)
    run_requests(runner, [with_adapter(read_adapter("new", str(copy), 16), [3, 4], 2, "r")])


def test_adapters_without_the_weights_of_layers_that_they_name_are_refused_when_they_are_loaded(
    llama: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    copy = edited(folders["plain"], tmp_path / "copy")
    file = copy / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({name: weight for name, weight in whole.items() if ".layers.1." not in name}, file)
    runner = build_runner(llama, enable_lora=True)
    text = failing(runner, read(copy))
    assert "its target_modules name 7 layers whose weights its file lacks: model.layers.1.mlp.down_proj, " in text
    for number, settings in enumerate(
        ({"layers_to_transform": [0, 2]}, {"target_modules": ".*_proj"}, {"exclude_modules": ["nothing"]})
    ):
        config = json.loads((folders["plain"] / "adapter_config.json").read_text()) | settings
        (copy / "adapter_config.json").write_text(json.dumps(config))
        if number < 2:
            run_requests(runner, [with_adapter(read(copy, f"{number}"), [3, 4], 2, "r")])
        else:
            assert "whose weights its file lacks" in failing(runner, read(copy, f"{number}"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38])
def test_weights_that_are_not_finite_are_refused_when_they_are_loaded(
    value: float, llama: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also B's values after scaling: NaN would spread to other requests of the batch."""
    copy = edited(folders["plain"], tmp_path / "copy", lora_alpha=4000)
    tensors = load_file(copy / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    tensors[name][3, 1] = value
    save_file(tensors, copy / "adapter_model.safetensors")
    runner = build_runner(llama, enable_lora=True)
    assert "model.layers.1.mlp.down_proj has weights that are not finite" in failing(runner, read(copy))
    run_requests(runner, [with_adapter(read(folders["plain"]), [3, 4], 2, "r")])


def test_files_that_change_in_place_never_give_kv_of_the_old_content(
    llama: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The old content is served from the host as long as it is there, and refused when it would be read again."""
    runner = build_runner(llama, enable_lora=True, max_loras=1, max_cpu_loras=1)
    copy, prompt = edited(folders["plain"], tmp_path / "copy"), list(range(5, 45))
    old = read(copy, "name")
    scheduler, _ = run_requests(runner, [with_adapter(old, prompt, 4, "first")])
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copy / name).write_bytes((folders["stabilised"] / name).read_bytes())
    new = read(copy, "name")
    requests = [with_adapter(old, prompt, 4, "again"), with_adapter(new, prompt, 4, "new")]
    drive(runner, scheduler, requests)
    expected = [greedy(peft_model(llama, folders[name]), prompt, 4)[0] for name in ("plain", "stabilised")]
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected
    assert [one.num_cached_tokens > 0 for one in requests] == [True, False]
    with pytest.raises(AssertionError, match="are not the registered ones"):
        drive(runner, scheduler, [with_adapter(old, prompt, 4, "late")])


def test_weights_in_other_shapes_than_the_header_said_are_refused(
    llama: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is read before the weights, and the files may be exchanged in between."""
    runner = build_runner(llama, enable_lora=True)
    adapter, other = read(folders["plain"]), folders["attention"]

    def exchanged(*given: Any) -> AdapterFiles:
        files, later = open_adapter(*given), open_adapter("later", str(other), 16)
        return AdapterFiles(files.name, files.config, files.weights, {**files.factors, **later.factors})

    monkeypatch.setattr("pagewise_executor.adapters.host.open_adapter", exchanged)
    assert "have changed while they were read" in failing(runner, adapter)
