"""Options: command line, environment, defaults, and errors that name their source."""

from typing import Annotated

import pytest
from msgspec import Struct
from pagewise_shared.config import (
    DraftModelConfig,
    ExecutorConfig,
    GatewayConfig,
    GatewaysConfig,
    SchedulerConfig,
    ServeConfig,
    SpeculativeConfig,
    UpConfig,
    build_config,
    misspelt_variables,
    options_of,
    parse_config,
    parse_size,
    parse_speculative,
    secret_variables,
    size_text,
    to_argv,
)
from pagewise_shared.config.options import without
from pagewise_shared.errors import ConfigError
from pagewise_shared.version import package_version

COMMANDS: list[type[Struct]] = [SchedulerConfig, GatewayConfig, ExecutorConfig, GatewaysConfig, ServeConfig, UpConfig]
OF_NODES = {"nnodes", "node_rank", "master_addr", "master_port"}
SET_BY_SERVE = {"scheduler", "executor_id", "role", "gateway_id", "key_name", "reuse_port", "service_status", *OF_NODES}
"""The options that ``pagewise serve`` sets for the services it starts."""


def parse(*argv: str, **environ: str) -> ServeConfig:
    return parse_config(ServeConfig, argv, prog="pagewise serve", description="", environ=environ)


def test_command_line_wins_over_environment_over_default() -> None:
    assert parse().executor.max_num_seqs is None
    assert parse(PAGEWISE_MAX_NUM_SEQS="7").executor.max_num_seqs == 7
    assert parse("--max-num-seqs", "9", PAGEWISE_MAX_NUM_SEQS="7").executor.max_num_seqs == 9


def test_the_model_is_positional_or_from_the_environment() -> None:
    assert parse("some/model").gateway.model == "some/model"
    assert parse(PAGEWISE_MODEL="other/model").scheduler.model == "other/model"
    assert parse().executor.model == "pagewise-demo"


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--port", "abc"], {}, "--port must be a whole number from 0 to 65535 (got 'abc')"),
        (["--block-size", "0"], {}, "--block-size"),
        (["--max-num-seqs", "many"], {}, "--max-num-seqs"),
        (["--num-blocks", "4", "--kv-memory", "1GiB"], {}, "--kv-memory"),
        (["--kv-memory", "lots"], {}, "lots"),
        (["--deterministic", "--enable-lora"], {}, "--deterministic: not with --enable-lora"),
        (
            ["--gpu-memory-utilization", "0.5", "--kv-memory", "1GiB"],
            {},
            "--kv-memory and --gpu-memory-utilization both set",
        ),
        (["--gpu-memory-utilization", "0.5"], {"PAGEWISE_NUM_BLOCKS": "4"}, "--num-blocks and --gpu-memory"),
        (["--tier-dtype", "int4", "--kv-dtype", "int8"], {}, "--tier-dtype int4: --kv-dtype int8 has made KV smaller"),
        (["--gpu-memory-utilization", "0"], {}, "--gpu-memory-utilization must be a number above 0 to 1"),
        (["--gpu-memory-utilization", "90"], {}, "--gpu-memory-utilization must be a number above 0 to 1 (got '90')"),
        (
            ["--max-num-seqs", "300"],
            {"PAGEWISE_MAX_NUM_BATCHED_TOKENS": "128"},
            "--max-num-seqs 300 is more than --max-num-batched-tokens 128: each sequence",
        ),
        (["--max-num-batched-tokens", "100000"], {}, "--max-num-batched-tokens must be a whole number from 1 to 65536"),
        (["--max-model-len", "0"], {}, "--max-model-len must be a whole number from 1 or auto (got 0)"),
        (["--max-model-len", "long"], {}, "or auto (got 'long')"),
        (["--device", "tpu"], {}, "--device"),
        (["--threads", "0"], {}, "--threads must be a whole number from 1 or auto (got '0')"),
        ([], {"PAGEWISE_THREADS": "many"}, "PAGEWISE_THREADS must be a whole number from 1 or auto (got 'many')"),
        (["--no-such-option"], {}, "--no-such-option"),
        ([], {"PAGEWISE_PORT": "x"}, "PAGEWISE_PORT"),
        (["--speculative", "eagle:3"], {}, "--speculative-config"),
        (["--speculative-config", "ngram:0"], {}, "--speculative-config: Expected `int` >= 1"),
        (["--speculative-config", '{"method": "eagle"}'], {}, "--speculative-config"),
        (["--speculative-config", '{"num_speculative_tokens": 3, "model": "x"}'], {}, "unknown field `model`"),
        (["--speculative-config", '{"method": "eagle3"}'], {}, "eagle3 needs the model that drafts"),
        (["--speculative-config", '{"method": "mtp", "model": "x"}'], {}, "mtp has its model in the checkpoint"),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 17}'], {}, "Expected `int` <= 16"),
        (
            ["--speculative", '{"num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 3}'],
            {},
            "prompt_lookup_min is greater than prompt_lookup_max",
        ),
        (["--speculative", '{"num_speculative_tokens": 3, "prompt_lookup_max": 33}'], {}, "Expected `int` <= 32"),
        (["--speculative", '{"num_speculative_tokens": 3, "disable_by_batch_size": 33}'], {}, "Expected `int` <= 32"),
        (["--override-generation-config", '{"top_k": -2}'], {}, "--override-generation-config: Expected `int` >= -1"),
        (["--sse-keep-alive-interval", "-1"], {}, "--sse-keep-alive-interval must be a number from 0 to 86400"),
        (["--speculative", "[4]"], {}, "--speculative-config: Expected `object`"),
        ([], {"PAGEWISE_DEVICE": "tpu"}, "PAGEWISE_DEVICE must be auto, cpu or cuda (got 'tpu')"),
        (["--tensor-parallel", "0"], {}, "--tensor-parallel must be a whole number from 1"),
        (["--tensor-parallel", "2", "--kv-mapping", "mmu"], {}, "cannot be used with --kv-mapping mmu"),
        (["--quantization", "int8", "--quantization-text", "text"], {}, "is for --quantization int4"),
        (
            ["--quantization", "int4", "--quantization-text", "text", "--tensor-parallel", "2"],
            {},
            "--tensor-parallel 2 cannot be used with --quantization-text",
        ),
        (["--simulate"], {"PAGEWISE_TENSOR_PARALLEL": "4"}, "--tensor-parallel 4 cannot be used with --simulate"),
        (["--pipeline-parallel-size", "2"], {}, "--pipeline-parallel-size: only 1 can be given (got '2')"),
        (["--enable-expert-parallel"], {}, "there is no option --enable-expert-parallel"),
    ],
)
def test_errors_name_their_source(
    argv: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*argv, **environ)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--nnodes", "3"], "--nnodes 3 does not divide --tensor-parallel 4"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2 is not below --nnodes 2"),
        (["--node-rank", "1"], "--node-rank 1 is not below --nnodes 1"),
        (["--nnodes", "2", "--node-rank", "1", "--master-port", "0"], "--master-port 0 is for node 0"),
        (
            ["--nnodes=2", "--master-addr="],
            "--master-addr '' is empty, and should be the name or the address of node 0",
        ),
        (["--nnodes=2", "--master-addr=a b"], "--master-addr 'a b' is neither the name nor the address of a host"),
        (["--nnodes=2", "--master-addr=tcp://a"], "--master-addr 'tcp://a' is neither the name nor the address"),
        (["--nnodes=2", "--master-addr=-a"], "--master-addr '-a' is neither the name nor the address of a host"),
        (["--nnodes=2", f"--master-addr={'a' * 64}.b"], "is neither the name nor the address of a host"),
        (["--nnodes=2", "--master-addr=[::1]"], "'[::1]' has brackets: write an IPv6 address without them"),
        (["--nnodes=2", "--master-addr=host-a:29501"], "'host-a:29501' has a port: --master-port sets it"),
        (["--nnodes=2", "--master-addr=10.0.0.256"], "--master-addr '10.0.0.256' is not an IPv4 address"),
        (["--nnodes=2", "--master-addr=0.0.0.0"], "'0.0.0.0' is not the address of a host: other"),
    ],
)
def test_nodes_of_an_executor_have_numbers_and_equal_parts(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(
            ExecutorConfig, ["--tensor-parallel=4", *argv], prog="pagewise-executor", description="", environ={}
        )
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    ["host-a", "pagewise-0.pagewise.default.svc.cluster.local.", "node_1", "10.0.0.25", "::1", "fe80::1%eth0"],
)
def test_names_and_addresses_of_node_0(address: str) -> None:
    argv = ["--tensor-parallel=4", "--nnodes=2", f"--master-addr={address}"]
    config = parse_config(ExecutorConfig, argv, prog="pagewise-executor", description="", environ={})
    assert config.master_addr == address


def test_ranks_are_asked_for_by_either_name() -> None:
    assert parse("--tensor-parallel-size", "4").executor.tensor_parallel == 4
    assert parse("--tensor-parallel=2").executor.tensor_parallel == 2
    assert parse().executor.tensor_parallel == 1


def test_speculation_is_asked_for_as_in_vllm_or_in_short() -> None:
    long = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    config = parse("--speculative-config", long).scheduler.speculative_config
    assert config == parse(PAGEWISE_SPECULATIVE_CONFIG=long).scheduler.speculative_config == long
    parsed = parse_speculative(long)
    assert (parsed.num_speculative_tokens, parsed.prompt_lookup_max, parsed.prompt_lookup_min) == (5, 4, 2)
    short = parse("--speculative", "ngram:6").scheduler.speculative_config
    assert short is not None
    assert parse_speculative(short) == SpeculativeConfig(num_speculative_tokens=6)
    assert parse().scheduler.speculative_config is None
    for bound, value in (("prompt_lookup_max", 2), ("prompt_lookup_min", 6)):  # the other one is the same then
        parsed = parse_speculative(f'{{"num_speculative_tokens": 4, "{bound}": {value}}}')
        assert (parsed.prompt_lookup_max, parsed.prompt_lookup_min) == (value, value)


def test_draft_models_are_asked_for_as_in_vllm() -> None:
    given = '{"method": "eagle3", "model": "head", "num_speculative_tokens": 5, "disable_by_batch_size": 64}'
    config = parse("--speculative-config", given)
    assert config.executor.speculative_config == config.scheduler.speculative_config == given
    expected = DraftModelConfig(method="eagle3", model="head", num_speculative_tokens=5, disable_by_batch_size=64)
    assert parse_speculative(given) == expected
    assert parse_speculative('{"method": "mtp"}') == DraftModelConfig(method="mtp")


def test_the_number_of_threads_may_be_auto() -> None:
    assert parse().executor.threads == parse("--threads", "auto", PAGEWISE_THREADS="3").executor.threads == "auto"
    assert parse(PAGEWISE_THREADS="auto").executor.threads == "auto"
    assert parse("--threads", "2", PAGEWISE_THREADS="auto").executor.threads == 2
    assert parse(PAGEWISE_THREADS="3").executor.threads == 3


def test_options_travel_to_child_processes() -> None:
    config = parse(
        "m", "--device", "cpu", "--num-blocks", "12", "--port", "1", "--trust-remote-code", "--max-waiting=3",
        "--max-model-len", "auto",
    )  # fmt: skip
    executor = ExecutorConfig(model="m", device="cpu", num_blocks=12, trust_remote_code=True, max_model_len="auto")
    parts: list[tuple[Struct, Struct]] = [
        (config.executor, executor),
        (config.gateway, GatewayConfig(model="m", port=1)),
        (config.scheduler, SchedulerConfig(model="m", max_waiting=3, max_model_len="auto")),
    ]
    for part, expected in parts:
        assert part == expected
        assert parse_config(type(part), to_argv(part), prog="", description="", environ={}) == expected


def test_serve_has_every_option_of_the_services_but_those_that_it_sets() -> None:
    of_services = {name for kind in (SchedulerConfig, GatewayConfig, ExecutorConfig) for name in options_of(kind)}
    assert options_of(ServeConfig).keys() == of_services - SET_BY_SERVE | {"gateways", "executors", "exit_on_failure"}
    assert parse("--listen=ipc:///x", PAGEWISE_SCHEDULER="ipc:///y", PAGEWISE_KEY_NAME="z") == ServeConfig(
        listen="ipc:///x"
    )


def test_what_several_commands_have_is_the_same_option_in_all_of_them() -> None:
    differ = {
        name
        for one in COMMANDS
        for another in COMMANDS
        for name in options_of(one).keys() & options_of(another).keys()
        if options_of(one)[name] != options_of(another)[name]
    }
    # Where the scheduler is and whose key it is depend on who asks; serve listens on private sockets by default.
    assert differ == {"scheduler", "key_name", "listen", "listen_gateways"}


def test_parts_that_disagree_about_an_option_are_noticed() -> None:
    class One(Struct, frozen=True, kw_only=True):
        limit: int = 1
        own: int = 0

    class Two(Struct, frozen=True, kw_only=True):
        limit: int = 2

    class Torn(Struct, frozen=True, kw_only=True):
        one: One = One()
        two: Two = Two()

    class Whole(Struct, frozen=True, kw_only=True):
        one: Annotated[One, without("limit")] = One()
        two: Two = Two()

    with pytest.raises(AssertionError, match="disagree about limit"):
        options_of(Torn)
    assert build_config(Whole, {"limit": "3", "own": "4"}, {}) == Whole(one=One(own=4), two=Two(limit=3))


def test_every_option_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for name in options_of(ServeConfig).keys() - {"api_keys"}:
        assert name == "model" or "--" + name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500_000_000), ("10k", 10_000), ("123", 123)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1KiB"), (65536, "64KiB"), (2**20 + 1, "1025KiB"), (2**24, "16MiB"), (40 * 2**30, "40GiB")]
)
def test_sizes_are_said_as_they_are_read(size: int, text: str) -> None:
    assert size_text(size) == text
    assert size <= parse_size(text) <= size * 1.1 + 1024


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "4 Gigs", "1e9", "4IB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_values_can_come_without_a_parser() -> None:
    assert build_config(ExecutorConfig, {"block_size": "32"}, {}).block_size == 32
    with pytest.raises(ConfigError, match="--block-size"):
        build_config(ExecutorConfig, {"block_size": "-1"}, {})


@pytest.mark.parametrize("config_type", COMMANDS)
def test_every_option_has_its_place_in_the_help(config_type: type[Struct], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(config_type, ["--help"], prog="p", description="", environ={})
    ungrouped = capsys.readouterr().out.partition("\nmodel:\n")[0]
    assert "--help" in ungrouped
    assert "--version" in ungrouped
    assert ungrouped.count("--") == 2


def test_secrets_come_from_the_environment_alone_and_stay_off_command_lines() -> None:
    config = parse("m", PAGEWISE_API_KEYS="alice: sk-1")
    assert config.gateway.api_keys == "alice: sk-1"
    assert "sk-1" not in " ".join(to_argv(config.gateway))
    assert secret_variables(config.gateway) == {"PAGEWISE_API_KEYS": "alice: sk-1"}
    assert secret_variables(config.executor) == {}
    with pytest.raises(SystemExit):
        parse("--api-keys", "alice: sk-1")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("PAGEWISE_MAX_NUM_SEQ", "PAGEWISE_MAX_NUM_SEQS"),
        ("PAGEWISE_KVMEMORY", "PAGEWISE_KV_MEMORY"),
        ("PAGEWISE_MAX_MODEL_LENGTH", "PAGEWISE_MAX_MODEL_LEN"),
        ("PAGEWISE_API_KEY_FILE", "PAGEWISE_API_KEYS_FILE"),
        ("PAGEWISE_XYZ", None),
    ],
)
def test_a_misspelt_variable_is_told_with_the_nearest_name(name: str, near: str | None) -> None:
    (warning,) = misspelt_variables({name: "a secret", "HOME": "/", "PAGEWISE": "no"})
    assert f"variable {name} is unknown" in warning
    assert warning.endswith(f": did you mean {near}?" if near else "no effect")
    assert "secret" not in warning


def test_variables_of_other_services_and_empty_ones_are_not_misspelt() -> None:
    names = {option.variable for command in COMMANDS for option in options_of(command).values()}
    assert len(names) > 60
    known = names | {"PAGEWISE_URL", "PAGEWISE_API_KEY", "PAGEWISE_HTTP_PORT"}
    assert misspelt_variables(dict.fromkeys(known, "1") | {"PAGEWISE_NUM_SEQS": ""}) == []
    (warning,) = misspelt_variables({"PAGEWISE_A\nB": "1"})
    assert "\n" not in warning


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_its_version(command: type[Struct], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(command, ["--version"], prog="a program", description="", environ={})
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"a program {package_version()}\n"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_needs_blocks_that_are_lent(role: str) -> None:
    assert build_config(ExecutorConfig, {"role": role}, {}).role == role
    with pytest.raises(ConfigError, match=f"--role {role} needs --lend-blocks"):
        build_config(ExecutorConfig, {"role": role, "lend_blocks": False}, {})
