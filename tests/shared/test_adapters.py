"""Adapter files in gateways: refusals, and that no file makes them work, or answer, without bounds."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_shared.adapters import open_adapter, read_adapter
from pagewise_shared.errors import AdapterError

from tests.adapter_files import write_adapter

MODULE = "model.layers.0.self_attn.q_proj"


def refused(folder: Path, name: str = "mine") -> str:
    with pytest.raises(AdapterError) as error:
        read_adapter(name, str(folder), 16)
    return str(error.value)


def rewrite_header(folder: Path, **changes: Any) -> None:
    """Change entries of the header of the weights, by their names."""
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | changes
    text = json.dumps({key: value for key, value in header.items() if value is not None}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("pattern", "rank"),
    [
        ("q_proj", 4),
        ("self_attn.q_proj", 4),
        (r"layers\.0\.self_attn\.q_proj", 4),
        (r"layers\.[0-3]\.self_attn\.(q|k)_proj", 4),
        (r"^model.layers.0.self_attn.q_proj", 4),
        (r".*\.q_proj", 4),
        ("proj", 8),  # no whole part of the name
        ("q_proj.lora", 8),
        (r"layers\.1\.self_attn\.q_proj", 8),
    ],
)
def test_patterns_match_whole_parts_at_the_end_of_a_name(pattern: str, rank: int, tmp_path: Path) -> None:
    """As in PEFT: expected values come from ``peft.utils.other.get_pattern_key``."""
    folder = write_adapter(tmp_path / "one", rank=rank, rank_pattern={pattern: 4}, alpha_pattern={pattern: 2})
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    factor = open_adapter("one", str(folder), 16).factors[MODULE]
    assert (factor.rank, factor.scale) == ((4, 2 / 4) if rank == 4 else (8, 8 / 8))


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*b",
        "(.*)*x",
        r"(\w+\.)+\w+_proj",
        "a*a*a*a*a*a*a*a*a*b",
        "(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)",
        "(a{1,50}){1,50}x",
        "x" * 257,
        "(?i)q_proj",
        "q_proj)|(k_proj",
        "(" * 200,
    ],
)
def test_patterns_that_could_take_long_are_refused(pattern: str, tmp_path: Path) -> None:
    for field in ("rank_pattern", "alpha_pattern"):
        text = refused(write_adapter(tmp_path / field, **{field: {pattern: 4}}))
        assert field in text
        assert "pattern" in text
        assert len(text) < 700


def test_so_many_patterns_are_refused(tmp_path: Path) -> None:
    many = {f"layers.{number}.q_proj": 4 for number in range(1025)}
    assert "more than 1024 patterns" in refused(write_adapter(tmp_path / "many", rank_pattern=many))
    repeating = {f"x{number}.*": 4 for number in range(17)}
    assert "more than 16 patterns repeat" in refused(write_adapter(tmp_path / "open", alpha_pattern=repeating))


def test_a_weight_that_is_there_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    entry = {"dtype": "F32", "shape": [4, 48], "data_offsets": [0, 768]}
    rewrite_header(folder, **{f"{MODULE}.lora_A.weight": entry})
    assert f"{MODULE}.lora_A.weight is there twice, with and without base_model.model." in refused(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "x" * 100_000},
        {"init_lora_weights": "y" * 100_000},
        {"bias": "z\n" * 50_000},
        {"k" * 100_000: True},
        {"rank_pattern": {"(" + "a" * 200: 3}},
        {"lora_alpha": 10**400},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"r": "4"},
    ],
)
def test_what_errors_quote_is_cut(settings: dict[str, Any], tmp_path: Path) -> None:
    text = refused(write_adapter(tmp_path / "one", **settings), "name" * 100)
    assert text.startswith("the adapter 'name")
    assert len(text) < 1000
    assert text.isprintable()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32"},
        {"dtype": "F32", "shape": [4, "x"], "data_offsets": [0, 768]},
        {"dtype": "F32", "shape": [4, 48], "data_offsets": [0]},
        {"dtype": ["F32"], "shape": [4, 48], "data_offsets": [0, 768]},
        {"dtype": "F32", "shape": [4, 48], "data_offsets": [0, 10**400]},
        [],
    ],
)
def test_headers_that_are_none_are_refused(entry: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    rewrite_header(folder, **{f"base_model.model.{MODULE}.lora_A.weight": entry})
    assert "the adapter 'mine' cannot be" in refused(folder)


def test_names_of_modules_have_bounds(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    name = f"base_model.model.{'a.' * 200}q_proj.lora_"
    pair = {"A": [4, 48], "B": [48, 4]}
    entries = {
        f"{name}{part}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 768]}
        for part, shape in pair.items()
    }
    rewrite_header(folder, **entries)
    assert "one whose name is too long" in refused(folder)


@given(st.text(alphabet="qproj_.\\()|*+?{}^$1,", max_size=12))
def test_a_pattern_is_taken_as_it_is_or_refused(pattern: str) -> None:
    with TemporaryDirectory() as path:
        folder = write_adapter(Path(path) / "one", alpha_pattern={pattern: 4})
        try:
            scale = open_adapter("mine", str(folder), 16).factors[MODULE].scale
        except AdapterError:
            assert "alpha_pattern" in refused(folder)
        else:
            assert scale == (1.0 if re.match(rf"(.*\.)?({pattern})$", MODULE) else 2.0)
