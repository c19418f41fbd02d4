"""Options of ``vllm serve`` that mean the same are accepted, and all others are refused with the nearest name."""

from typing import Any

import pytest
from msgspec import Struct
from pagewise_shared.config import GatewayConfig, SchedulerConfig, ServeConfig, options_of, parse_config
from pagewise_shared.config.reading import flags_of
from pagewise_shared.config.vllm import ALIASES, ALWAYS, NAMES, ONLY, options_from
from pagewise_shared.errors import ConfigError


def parse(*argv: str, config: type[Struct] = ServeConfig) -> Any:
    return parse_config(config, argv, prog="pagewise", description="", environ={})


def changed(config: ServeConfig) -> dict[str, Any]:
    """The options that differ from the defaults."""
    found = {"gateways": config.gateways} if config.gateways != 1 else {}
    for part in (config.scheduler, config.gateway, config.executor):
        for name, option in options_of(type(part)).items():
            if getattr(part, name) != option.default:
                found[name] = getattr(part, name)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        parse(*argv)
    return capsys.readouterr().err.splitlines()[-1]


def test_no_option_is_in_two_tables_and_aliases_set_options_that_exist() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert {option for option, _ in ALIASES.values()} <= options_of(ServeConfig).keys()
    assert not set(flags_of(ServeConfig)) & {*ALWAYS, *ONLY}


def test_behaviour_that_is_always_on_can_be_asked_for_and_not_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ALWAYS:
        assert changed(parse(name)) == {}
        assert f"{name}: it is always on" in refusal(capsys, f"--no-{name[2:]}")


def test_values_that_describe_the_behaviour_are_accepted_and_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    for name, accepted in ONLY.items():
        assert all(changed(parse(name, value)) == {} for value in accepted)
        assert f"{name}: only {' and '.join(accepted)} can be given (got 'other')" in refusal(capsys, name, "other")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tensor-parallel-size", "2"], {"tensor_parallel": 2}),
        (["-tp", "4"], {"tensor_parallel": 4}),
        (["--max-model-len", "32k"], {"max_model_len": 32_000}),
        (["--max-model-len", "32K"], {"max_model_len": 32_768}),
        (["--max-model-len", "-1"], {"max_model_len": "auto"}),
        (["--max-num-batched-tokens=8K"], {"max_num_batched_tokens": 8192}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--kv-cache-memory-bytes", "25G"], {"kv_memory": str(25 * 2**30)}),
        (["--kv-offloading-size", "2.5"], {"host_memory": str(5 * 2**29)}),
        (["--kv-offloading-size", "0"], {}),
        (["--kv-cache-dtype", "fp8_e4m3"], {"kv_dtype": "fp8"}),
        (["--kv-cache-dtype", "int8_per_token_head"], {"kv_dtype": "int8"}),
        (["--num-gpu-blocks-override", "77"], {"num_blocks": 77}),
        (["--enforce-eager"], {"cuda_graphs": False}),
        (["--no-enforce-eager"], {}),
        (["-asc", "3"], {"gateways": 3}),
        (["--enable-log-requests"], {"log_requests": True}),
        (["--log-level", "DEBUG"], {"log_level": "debug"}),
        (["-q", "fp8"], {"quantization": "fp8"}),
        (["-sc", "ngram:4"], {"speculative_config": "ngram:4"}),
        (["--api-key", "sk-1"], {"api_keys": "default: sk-1 operator=yes"}),
        (["--api-key", "sk-1", "sk-2"], {"api_keys": "default: sk-1 operator=yes, default: sk-2"}),
    ],
)
def test_options_are_taken_with_their_units(argv: list[str], expected: dict[str, Any]) -> None:
    assert changed(parse(*argv)) == expected


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--max-num-seq", "3"], "there is no option --max-num-seq: did you mean --max-num-seqs?"),
        (["--tensor-paralel-size", "3"], "did you mean --tensor-parallel-size?"),
        (["--enable-expert-parallel"], "there is no option --enable-expert-parallel"),
        (["--kv-cache-dtype-skip-layers", "1"], "there is no option --kv-cache-dtype-skip-layers: did you mean --kv-"),
        (["--nothing-like-it"], "there is no option --nothing-like-it"),
        (["model", "another"], "unrecognized arguments: another"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype: 'int8' cannot be used"),
        (["--api-key", "sk-1,sk-2"], "--api-key: a key has a space, a comma"),
        (["--max-model-len", "3z"], "--max-model-len must be a whole number from 1 or auto (got '3z')"),
    ],
)
def test_errors_name_the_option(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error in refusal(capsys, *argv)


def test_a_command_accepts_only_options_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--api-key", "sk-1", config=GatewayConfig).api_keys == "default: sk-1 operator=yes"
    with pytest.raises(SystemExit):
        parse("--api-key", "sk-1", config=SchedulerConfig)


def test_keyword_arguments_are_accepted_as_well() -> None:
    known = options_of(ServeConfig).keys()
    given = {"tensor_parallel_size": 2, "enforce_eager": True, "dtype": "half", "enable_prefix_caching": True, "x": 1}
    assert options_from(given, known) == {"tensor_parallel": "2", "cuda_graphs": False, "dtype": "float16", "x": 1}
    with pytest.raises(ConfigError, match="--pipeline-parallel-size: only 1 can be given"):
        options_from({"pipeline_parallel_size": 2}, known)
