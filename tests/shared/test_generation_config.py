"""The defaults of sampling parameters: from which file or option they come, and what is wrong in them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pagewise_shared.config import GatewayConfig
from pagewise_shared.config.sampling_defaults import SamplingDefaults, parse_override
from pagewise_shared.errors import ConfigError, ModelError
from pagewise_shared.generation_config import GenerationConfig, read_generation_config

QWEN = {
    "bos_token_id": 7,
    "do_sample": True,
    "eos_token_id": [8, 9],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "max_new_tokens": 2048,
    "transformers_version": "4.51.0",
}
DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=2048)


def folder(path: Path, content: object) -> Path:
    path.mkdir()
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read(model: Path, **options: Any) -> GenerationConfig:
    return read_generation_config(GatewayConfig(**options), model)


def test_where_the_defaults_come_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, other = folder(tmp_path / "model", QWEN), folder(tmp_path / "other", {"top_k": 5, "eos_token_id": 3})
    assert read(model) == GenerationConfig(DEFAULTS)
    assert read(model, generation_config="vllm") == GenerationConfig()
    assert read(tmp_path) == GenerationConfig()
    expected = GenerationConfig(SamplingDefaults(top_k=5), limits_output=True, eos_token_ids=frozenset({3}))
    assert read(model, generation_config=str(other)) == expected
    override = '{"temperature": 0, "min_p": 0.1}'
    expected = GenerationConfig(SamplingDefaults(temperature=0, top_k=20, top_p=0.95, min_p=0.1, max_new_tokens=2048))
    assert read(model, override_generation_config=override) == expected
    lines = [record.message.removeprefix("sampling defaults of requests: ") for record in caplog.records]
    assert lines == [
        f"temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=2048 from {model}/generation_config.json",
        f"top_k=5 from {other}/generation_config.json",
        f"top_k=20, top_p=0.95, max_new_tokens=2048 from {model}/generation_config.json; "
        "temperature=0, min_p=0.1 from --override-generation-config",
    ]


@pytest.mark.parametrize(
    ("options", "wanted", "without"),
    [
        ({}, 5000, 2048),  # the model's own number is a default, as in vLLM
        ({"generation_config": "vllm"}, 5000, 9999),
        ({"override_generation_config": '{"max_new_tokens": 100}'}, 100, 100),
        ({"generation_config": "vllm", "override_generation_config": '{"max_new_tokens": 100}'}, 100, 100),
        ({"generation_config": "DIR"}, 2048, 2048),
    ],
)
def test_the_number_of_output_tokens(tmp_path: Path, options: dict[str, str], wanted: int, without: int) -> None:
    model = folder(tmp_path / "model", QWEN)
    given = {name: value.replace("DIR", str(model)) for name, value in options.items()}
    generation = read(model, **given)
    assert (generation.limited(5000), generation.default_tokens(9999)) == (wanted, without)
    assert (generation.limited(None), generation.limited(1), generation.default_tokens(1)) == (None, 1, 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_values_in_a_file(tmp_path: Path, content: object, problem: str) -> None:
    model = folder(tmp_path / "model", content)
    with pytest.raises(ModelError, match=rf"generation_config.json.*{problem}"):
        read(model)


def test_bad_folders(tmp_path: Path) -> None:
    for given, problem in ((tmp_path, "has no generation_config.json"), (tmp_path / "none", "is no folder")):
        with pytest.raises(ConfigError, match=rf"--generation-config: {given} {problem}.*auto.*vllm"):
            read(tmp_path, generation_config=str(given))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON object"),
        ("[0.5]", "no JSON object"),
        ('{"temprature": 0.5}', "cannot set 'temprature': did you mean temperature?"),
        ('{"eos_token_id": 2}', "cannot set 'eos_token_id': there are temperature, top_k"),
        ('{"top_k": 1.5}', "Expected `int"),
        ('{"temperature": -1}', "temperature"),
    ],
)
def test_bad_overrides(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="--override-generation-config") as raised:
        parse_override(text)
    assert problem in str(raised.value)
