"""Every option of ``vllm serve`` is taken, or refused with a reason, as the table in the documents says."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from pagewise_shared.config import GatewayConfig, SchedulerConfig, ServeConfig, options_of, parse_config
from pagewise_shared.config.reading import flags_of
from pagewise_shared.config.vllm import FLAGS, SAME, VERSION
from pagewise_shared.config.vllm.parsing import BY_NAME, options_from
from pagewise_shared.errors import ConfigError

OF_VLLM = (Path(__file__).parent / "vllm_flags.txt").read_text().split()
"""The names of all options of that release, as its parser has them."""
OURS = flags_of(ServeConfig)


def parse(*argv: str, config: type[Struct] = ServeConfig) -> Any:
    return parse_config(config, argv, prog="pagewise", description="", environ={})


def changed(config: ServeConfig) -> dict[str, Any]:
    """What differs from the defaults."""
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


def test_every_option_of_vllm_is_told_of_once() -> None:
    assert VERSION == "0.33.0"
    assert set(OF_VLLM) <= set(SAME) | BY_NAME.keys()
    assert len(BY_NAME) == sum(len(flag.names) for flag in FLAGS)
    assert set(SAME) - {"--model"} <= set(OURS)
    refused = {name for flag in FLAGS if not flag.accepted for name in flag.names}
    assert not refused & set(OURS), "what exists is not refused"


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.accepted], ids=lambda flag: flag.names[0])
def test_what_is_not_there_is_refused_with_its_reason(flag: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in flag.names:
        for argv in ([name], [name, "1"]):
            assert refusal(capsys, *argv) == f"pagewise: error: {name}, an option of vLLM, is not there: {flag.text}"
        if name.startswith("--"):
            assert changed(parse(f"--no-{name[2:]}")) == {}


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.accepted and not flag.option], ids=lambda flag: flag.names[0]
)
def test_what_is_always_so_has_no_effect_and_the_rest_is_refused(flag: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in flag.names:
        if True in flag.harmless:
            assert changed(parse(name)) == {}
            assert f"--no-{name[2:]}, an option of vLLM, is not there" in refusal(capsys, f"--no-{name[2:]}")
        else:
            assert all(changed(parse(name, value)) == {} for value in flag.harmless)
            assert f"{name} other, an option of vLLM, is not there" in refusal(capsys, name, "other")


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
    ("argv", "said"),
    [
        (["--max-num-seq", "3"], "there is no option --max-num-seq: did you mean --max-num-seqs?"),
        (["--tensor-paralel-size", "3"], "did you mean --tensor-parallel-size?"),
        (["--nothing-like-it"], "unrecognized arguments: --nothing-like-it"),
        (["--compilation-config.mode=3"], "--compilation-config.mode, an option of vLLM, is not there: models are not"),
        (["-O3"], "-O, an option of vLLM, is not there"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype: 'int8' cannot be used"),
        (["--api-key", "sk-1,sk-2"], "--api-key: a key has a space, a comma"),
        (["--max-model-len", "3z"], "--max-model-len: "),
    ],
)
def test_errors_say_what_is_wrong(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *argv)


def test_a_command_takes_what_it_has_an_option_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--api-key", "sk-1", config=GatewayConfig).api_keys == "default: sk-1 operator=yes"
    with pytest.raises(SystemExit):
        parse("--api-key", "sk-1", config=SchedulerConfig)


def test_keyword_arguments_are_taken_as_well() -> None:
    known = options_of(ServeConfig).keys()
    given = {"tensor_parallel_size": 2, "enforce_eager": True, "dtype": "half", "enable_prefix_caching": True, "x": 1}
    assert options_from(given, known) == {"tensor_parallel": "2", "cuda_graphs": False, "dtype": "float16", "x": 1}
    with pytest.raises(ConfigError, match="each request has a seed of its own"):
        options_from({"seed": 0}, known)
