"""The arguments, secrets and resources of each kind of process that follow from a configuration. No Ray."""

from pathlib import Path
from typing import Any

import pytest
from pagewise.cluster.plan import PlanError, in_short, make_plan
from pagewise.keys import keys as make_keys
from pagewise_gateway.http.credentials import Client, digest_of, read_variable
from pagewise_shared.config import ExecutorConfig, GatewayConfig, SchedulerConfig, UpConfig


def plan_of(keys: dict[str, bytes] | None = None, **options: Any) -> Any:
    return make_plan(UpConfig(**options), gpus=False, keys=keys)


def test_each_process_has_its_own_secret_and_all_public_keys() -> None:
    plan = plan_of()
    for kind, process in plan.processes.items():
        assert {path for path in process.keys if path.endswith("secret")} == {f"{kind}/{kind}.key_secret"}
        assert "public/scheduler.key" in process.keys
        assert not any("secret" in argument for argument in process.argv)


def test_the_same_options_and_keys_make_the_same_plan_and_others_change_what_they_concern() -> None:
    plan = plan_of()
    digests = {kind: process.digest for kind, process in plan.processes.items()}
    again = plan_of(dict(reversed(plan.keys.items())))
    assert {kind: process.digest for kind, process in again.processes.items()} == digests
    assert plan_of().processes["executor"].digest != digests["executor"], "other keys"
    other = plan_of(plan.keys, executors=5, executor=ExecutorConfig(num_blocks=7))
    changed = {kind for kind, process in other.processes.items() if process.digest != digests[kind]}
    assert changed == {"executor"}
    assert "--num-blocks=7" in other.processes["executor"].argv


def test_the_ranks_of_an_executor_take_the_room_of_as_many() -> None:
    executor = plan_of(executor=ExecutorConfig(tensor_parallel=2), executor_cpus=3).processes["executor"]
    assert (executor.ranks, executor.cpus) == (2, 3)
    assert {"--tensor-parallel=2", "--threads=3"} <= set(executor.argv)


def test_a_folder_of_keys_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    configs = {
        "scheduler": SchedulerConfig(keys=folder),
        "gateway": GatewayConfig(keys=folder),
        "executor": ExecutorConfig(keys=folder),
    }
    with pytest.raises(PlanError, match="has no pair scheduler: run `pagewise keys init`"):
        plan_of(**configs)
    assert make_keys(["--keys", folder, "init"]) == 0
    plan = plan_of(**configs)
    assert plan.keys["executor/executor.key_secret"] == (tmp_path / "keys/executor/executor.key_secret").read_bytes()
    assert not any("--keys" in argument for process in plan.processes.values() for argument in process.argv)


@pytest.mark.parametrize(
    ("given", "sent", "key"),
    [
        (None, None, ""),
        ("sk-1", "default: sk-1 operator=yes, pagewise-controller: {} operator=yes", "{}"),
        ("alice: sk-1 concurrent=2", "alice: sk-1 concurrent=2, pagewise-controller: {} operator=yes", "{}"),
    ],
)
def test_metrics_are_read_with_a_key_of_their_own_where_there_are_api_keys(
    given: str | None, sent: str | None, key: str
) -> None:
    gateway = plan_of(gateway=GatewayConfig(api_keys=given)).processes["gateway"]
    assert gateway.variables.get("PAGEWISE_API_KEYS") == (sent and sent.format(gateway.metrics_key))
    assert gateway.metrics_key == key.format(gateway.metrics_key)
    assert "sk-1" not in gateway.metrics_key
    assert not any("sk-1" in argument for argument in gateway.argv)


def test_beside_that_key_a_single_one_means_what_it_means_alone() -> None:
    alone: dict[bytes, Client] = {}
    beside: dict[bytes, Client] = {}
    read_variable("sk-1", "", Client(""), alone)
    variables = plan_of(gateway=GatewayConfig(api_keys=" sk-1 ")).processes["gateway"].variables
    read_variable(variables["PAGEWISE_API_KEYS"], "", Client(""), beside)
    assert beside[digest_of("sk-1")] == alone[digest_of("sk-1")]


def test_the_controller_s_own_api_key_stays_the_same() -> None:
    options = {"gateway": GatewayConfig(api_keys_file="/keys")}
    plan = plan_of(**options)
    assert plan.processes["gateway"].metrics_key
    assert plan_of(plan.keys, **options).processes == plan.processes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"executors": 3, "max_executors": 2}, "--executors 3 is not between --min-executors 3 and 2"),
        ({"name": "a/b"}, "--name 'a/b'"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(**options)


def test_an_error_is_told_by_its_first_line_and_what_was_raised_elsewhere() -> None:
    text = "The actor died in its creation task\nTrace:\n  File a\nImportError: no Pagewise here\n\nIt ended."
    assert in_short(RuntimeError(text)) == "The actor died in its creation task ... ImportError: no Pagewise here"
    assert in_short(RuntimeError("alone")) == "alone"
    assert in_short(RuntimeError()) == "RuntimeError"
