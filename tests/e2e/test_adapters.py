"""Adapters through real processes and HTTP: chosen by name, loaded while the server runs, known to every gateway."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers
from pagewise_shared.model_files import resolve_model

from benchmarks.processes import Cluster, running, wait_until
from tests.lora_adapters import build_adapter, greedy, peft_model

PROMPT = "class Account:\n    def __init__(self, owner, balance):\n        self.owner ="
DEMO = "pagewise-demo"
LORA = ("--enable-lora", "--max-lora-rank=8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path, model = tmp_path_factory.mktemp("adapters"), resolve_model(DEMO)
    targets = {"first": ["q_proj", "v_proj"], "second": ["down_proj", "o_proj"], "third": ["up_proj", "k_proj"]}
    return {
        name: build_adapter(model, path / name, seed, target_modules=modules, r=8)
        for seed, (name, modules) in enumerate(targets.items())
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    model = resolve_model(DEMO)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(PROMPT)["input_ids"]
    found = {}
    for name, path in [(DEMO, None), *folders.items()]:
        tokens, _ = greedy(peft_model(model, path), prompt, 24)
        found[name] = tokenizer.decode(tokens)
    assert len(set(found.values())) == len(found), "adapters that change nothing show nothing"
    return found


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["", "2 ranks"])
def cluster(tmp_path: Path, folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    modules = ["--lora-modules", *(f"{name}={folders[name]}" for name in ("first", "second"))]
    updating = ("--allow-runtime-lora-updating", *modules)
    cluster = Cluster(
        tmp_path,
        gateways=2,
        scheduler_options=updating,
        gateway_options=(*LORA, *updating),
        executor_options=(*LORA, "--max-loras=2", f"--tensor-parallel={request.param}"),
    )
    with running(cluster, 1):
        yield cluster


@pytest.mark.timeout(240)
def test_32_adapters_take_turns_in_four_slots(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Of the same weights with 32 scales: none fails, each is computed with its own, and all loads are counted. Some of
    them are compared with PEFT's results."""
    made, count = {}, 12
    for number in range(32):
        made[f"adapter-{number}"] = folder = tmp_path / f"adapter-{number}"
        folder.mkdir()
        config = json.loads((folders["first"] / "adapter_config.json").read_text()) | {"lora_alpha": 1 + 3 * number}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        weights = "adapter_model.safetensors"
        (folder / weights).write_bytes((folders["first"] / weights).read_bytes())
    model = resolve_model(DEMO)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(PROMPT)["input_ids"]
    computed = list(made)[::4]
    expected = {name: tokenizer.decode(greedy(peft_model(model, made[name]), prompt, count)[0]) for name in computed}
    assert len(set(expected.values())) > 4, "adapters that compute the same show nothing"
    modules = ("--lora-modules", *(f"{name}={path}" for name, path in made.items()))
    cluster = Cluster(
        tmp_path,
        scheduler_options=modules,
        gateway_options=(*LORA, *modules),
        executor_options=(*LORA, "--max-loras=4", "--max-cpu-loras=8"),
    )
    with running(cluster, 1), ThreadPoolExecutor(32) as threads:
        wait_until(lambda: len(names(cluster.url)) == 33, 30, "the adapters are listed", cluster.scheduler)
        asked = list(made) * 2
        found = list(threads.map(lambda name: text(cluster.url, name, count), asked))
        assert found[:32] == found[32:]
        assert {name: found[asked.index(name)] for name in computed} == expected
        assert cluster.metric("lora_load_errors_total") == 0
        # A gauge, whose value may be a second old.
        wait_until(lambda: cluster.metric("lora_adapters_resident") == 4, 10, "the slots are full", cluster.scheduler)
        loads, evictions = cluster.metric("lora_loads_total"), cluster.metric("lora_evictions_total")
        assert loads - 32 - evictions == 4, "32 loads for a check, and one for each slot that was filled"
        assert evictions >= 28


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def text(url: str, model: str, count: int = 24) -> str:
    answer = post(
        url, "/v1/completions", model=model, prompt=PROMPT, max_tokens=count, temperature=0, ignore_eos=True,
        skip_special_tokens=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def names(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]}


@pytest.mark.timeout(180)
def test_adapters_are_served_by_name_and_loaded_while_the_server_runs(
    cluster: Cluster, folders: dict[str, Path], expected: dict[str, str]
) -> None:
    one, other = cluster.urls.values()
    wait_until(lambda: names(one) == {DEMO, "first", "second"}, 30, "the adapters are listed", cluster.scheduler)
    for name in (DEMO, "first", "second", DEMO):
        assert text(one, name) == expected[name]
    listed = {model["id"]: model for model in httpx.get(f"{one}/v1/models").json()["data"]}
    assert (listed["first"]["parent"], listed["first"]["root"]) == (DEMO, str(folders["first"]))

    missing = post(other, "/v1/completions", model="third", prompt=PROMPT)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    loaded = post(one, "/v1/load_lora_adapter", lora_name="third", lora_path=str(folders["third"]))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    wait_until(lambda: "third" in names(other), 10, "the other gateway knows it", cluster.scheduler)
    assert text(other, "third") == expected["third"]  # one of the two slots is given up
    assert cluster.metric("lora_evictions_total") == 1

    # Neither a gateway nor the scheduler takes it along.
    cluster.gateways["gateway-1"].close()
    cluster.start_gateway("gateway-1")
    wait_until(lambda: "third" in names(other), 10, "it is told again", cluster.scheduler)
    cluster.scheduler.close()
    cluster.start_scheduler()
    cluster.wait_ready(1)
    assert text(other, "third") == expected["third"]
    assert names(one) == names(other) == {DEMO, "first", "second", "third"}

    # The same name with other weights: nothing of the old KV is used.
    again = post(one, "/v1/load_lora_adapter", lora_name="third", lora_path=str(folders["first"]))
    assert again.status_code == 400
    again = post(one, "/v1/load_lora_adapter", lora_name="third", lora_path=str(folders["first"]), load_inplace=True)
    assert again.status_code == 200
    assert text(one, "third") == expected["first"]
    gone = post(one, "/v1/unload_lora_adapter", lora_name="third")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert post(one, "/v1/completions", model="third", prompt=PROMPT).status_code == 404
    assert post(one, "/v1/unload_lora_adapter", lora_name="third").status_code == 404
