"""Options: command line, environment, defaults, and errors that name their source."""

from typing import get_type_hints

import msgspec
import pytest
from pagewise_shared.config import (
    ExecutorConfig,
    SchedulerConfig,
    ServeConfig,
    build_config,
    parse_config,
    parse_size,
    secret_variables,
    to_argv,
)
from pagewise_shared.errors import ConfigError


def parse(*argv: str, **environ: str) -> ServeConfig:
    return parse_config(ServeConfig, argv, prog="pagewise serve", description="", environ=environ)


def test_command_line_wins_over_environment_over_default() -> None:
    assert parse().max_num_seqs == 256
    assert parse(PAGEWISE_MAX_NUM_SEQS="7").max_num_seqs == 7
    assert parse("--max-num-seqs", "9", PAGEWISE_MAX_NUM_SEQS="7").max_num_seqs == 9


def test_the_model_is_positional_or_from_the_environment() -> None:
    assert parse("some/model").model == "some/model"
    assert parse(PAGEWISE_MODEL="other/model").model == "other/model"
    assert parse().model == "pagewise-demo"


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--port", "99999"], {}, "--port"),
        (["--block-size", "0"], {}, "--block-size"),
        (["--max-num-seqs", "many"], {}, "--max-num-seqs"),
        (["--num-blocks", "4", "--kv-memory", "1GiB"], {}, "--kv-memory"),
        (["--kv-memory", "lots"], {}, "lots"),
        (["--device", "tpu"], {}, "--device"),
        (["--no-such-option"], {}, "--no-such-option"),
        ([], {"PAGEWISE_PORT": "x"}, "PAGEWISE_PORT"),
        ([], {"PAGEWISE_DEVICE": "tpu"}, "PAGEWISE_DEVICE"),
    ],
)
def test_errors_name_their_source(
    argv: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*argv, **environ)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_options_travel_to_child_processes() -> None:
    config = parse("m", "--device", "cpu", "--num-blocks", "12", "--port", "1", "--trust-remote-code", "--max-n", "3")
    assert parse_config(ExecutorConfig, to_argv(config, ExecutorConfig), prog="", description="", environ={}) == (
        ExecutorConfig(model="m", device="cpu", num_blocks=12, trust_remote_code=True)
    )
    assert parse_config(SchedulerConfig, to_argv(config, SchedulerConfig), prog="", description="", environ={}) == (
        SchedulerConfig(model="m", port=1, max_n=3)
    )


def test_every_option_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for name in ServeConfig.__struct_fields__:
        assert name == "model" or "--" + name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500_000_000), ("10k", 10_000), ("123", 123)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "4 Gigs", "1e9", "4IB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


def test_values_can_come_without_a_parser() -> None:
    assert build_config(ExecutorConfig, {"block_size": "32"}, {}).block_size == 32
    with pytest.raises(ConfigError, match="--block-size"):
        build_config(ExecutorConfig, {"block_size": "-1"}, {})


@pytest.mark.parametrize("config_type", [SchedulerConfig, ExecutorConfig, ServeConfig])
def test_every_option_has_its_place_in_the_help(
    config_type: type[SchedulerConfig | ExecutorConfig | ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(config_type, ["--help"], prog="p", description="", environ={})
    ungrouped = capsys.readouterr().out.partition("\nmodel:\n")[0]
    assert "--help" in ungrouped
    assert ungrouped.count("--") == 1


@pytest.mark.parametrize(("kind", "differ"), [(ExecutorConfig, set()), (SchedulerConfig, {"listen"})])
def test_an_option_of_serve_is_the_service_s(
    kind: type[ExecutorConfig] | type[SchedulerConfig], differ: set[str]
) -> None:
    of_serve, of_service = (
        {
            field.name: (get_type_hints(one, include_extras=True)[field.name], field.default, field.default_factory)
            for field in msgspec.structs.fields(one)
        }
        for one in (ServeConfig, kind)
    )
    both = of_serve.keys() & of_service.keys()
    assert len(both) > 20
    assert {name for name in both if of_serve[name] != of_service[name]} == differ


def test_secrets_come_from_the_environment_alone_and_stay_off_command_lines() -> None:
    config = parse("m", PAGEWISE_API_KEYS="alice: sk-1")
    assert config.api_keys == "alice: sk-1"
    assert "sk-1" not in " ".join(to_argv(config, SchedulerConfig))
    assert secret_variables(config, SchedulerConfig) == {"PAGEWISE_API_KEYS": "alice: sk-1"}
    assert secret_variables(config, ExecutorConfig) == {}
    with pytest.raises(SystemExit):
        parse("--api-keys", "alice: sk-1")
