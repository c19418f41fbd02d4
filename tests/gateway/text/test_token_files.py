"""Tokens, and their flags, may be named beside tokenizer.json only. The ids equal those of transformers' tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from pagewise_executor.structured.grammars import load_tokenizer
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.errors import ModelError
from transformers import AutoTokenizer

from tests.gateway.text.tokenizer_builders import byte_level_backend, sentencepiece_backend

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEXTS = [
    "<|im_start|>user\nhi<|im_end|>",
    "a  <|im_start|>  b <|im_end|> c<|im_end|>\n\nd",
    "x<|im_start|>y <|IM_START|> zx<think>y</think>",
    "<|user|> the fox <|end|>\n <größe> <|end|>",
    "<image> and <s>the</s> <extra> <|tool|>",
    "",
]


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, **FLAGS, **flags}


def added(**flags: bool) -> dict[str, Any]:
    """A marker behind the vocabulary of the byte-level tokenizer."""
    size = byte_level_backend().get_vocab_size()
    return {str(size): token("<|im_start|>", **flags), str(size + 1): token("<|im_end|>", **flags)}


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": added()}},
    "not special": {"tokenizer_config": {"added_tokens_decoder": added(special=False)}},
    "lstrip": {"tokenizer_config": {"added_tokens_decoder": added(lstrip=True)}},
    "rstrip": {"tokenizer_config": {"added_tokens_decoder": added(rstrip=True)}},
    "normalized": {"tokenizer_config": {"added_tokens_decoder": added(normalized=True, special=False)}},
    "single_word": {"tokenizer_config": {"added_tokens_decoder": added(single_word=True)}},
    "other flags than in tokenizer.json": {
        "tokenizer_config": {"added_tokens_decoder": {"0": token("<|end|>", lstrip=True, rstrip=True)}}
    },
    "no longer special": {"tokenizer_config": {"added_tokens_decoder": {"0": token("<|end|>", special=False)}}},
    "special in the configuration": {"tokenizer_config": {"added_tokens_decoder": {"330": token("<größe>")}}},
    "split_special_tokens": {"tokenizer_config": {"split_special_tokens": True}},
    "split_special_tokens and added": {
        "tokenizer_config": {"split_special_tokens": True, "added_tokens_decoder": added()}
    },
    "added_tokens.json": {"added_tokens": {"<|im_start|>": 331, "<|im_end|>": 332}},
    "added_tokens.json and special_tokens_map.json": {
        "added_tokens": {"<|im_start|>": 331, "<|im_end|>": 332},
        "special_tokens_map": {"bos_token": "<|im_start|>", "eos_token": token("<|im_end|>", lstrip=True)},
    },
    "special_tokens_map.json": {"special_tokens_map": {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}},
    "special_tokens_map.json with objects": {"special_tokens_map": {"eos_token": token("<|im_end|>", rstrip=True)}},
    "special_tokens_map.json beside added_tokens_decoder": {
        "tokenizer_config": {"added_tokens_decoder": added()},
        "special_tokens_map": {"eos_token": token("<extra>")},
    },
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": ["<|im_start|>", "<image>"]}},
    "additional_special_tokens in the map": {"special_tokens_map": {"additional_special_tokens": ["<|im_start|>"]}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<|im_start|>", "<extra>"]}},
    "named extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>"}}},
    "a token of its own name": {"tokenizer_config": {"image_token": "<image>"}},
    "a named token": {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<extra>"}},
    "a named token with flags": {
        "tokenizer_config": {"eos_token": {"__type": "AddedToken", **token("<|im_end|>", lstrip=True)}}
    },
    "add_bos_token": {"tokenizer_config": {"add_bos_token": True, "bos_token": "<|user|>"}},
    "ids behind a gap": {"tokenizer_config": {"added_tokens_decoder": {"400": token("<|im_start|>")}}},
}


def write(path: Path, backend: Any, files: dict[str, Any]) -> Path:
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    settings = {**FAST, **files.get("tokenizer_config", {})}
    for stem, content in {"config": {"eos_token_id": 0}, **files, "tokenizer_config": settings}.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model", byte_level_backend(), VARIANTS[name])
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_token_ids >= set(theirs.all_special_ids)


@pytest.mark.parametrize("name", ["added_tokens_decoder", "lstrip", "special_tokens_map.json with objects"])
def test_ids_of_another_kind_of_tokenizer_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    files = json.loads(json.dumps(VARIANTS[name]))
    backend = sentencepiece_backend()
    if decoder := files.get("tokenizer_config", {}).pop("added_tokens_decoder", None):
        tokens = enumerate(decoder.values(), backend.get_vocab_size())
        files["tokenizer_config"]["added_tokens_decoder"] = {str(number): one for number, one in tokens}
    path = write(tmp_path / "model", backend, files)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


NAMED = {"first_token": token("<|im_start|>"), "second_token": "<image>"}
OBJECTS = list(NAMED.values())


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"additional_special_tokens": OBJECTS}},
        {"tokenizer_config": {"extra_special_tokens": OBJECTS}},
        {"tokenizer_config": {"extra_special_tokens": NAMED}},
        {"special_tokens_map": {"additional_special_tokens": OBJECTS}},
    ],
)
def test_lists_of_tokens_without_a_type_are_their_texts(files: dict[str, Any], tmp_path: Path) -> None:
    plain = json.loads(json.dumps(files).replace(json.dumps(OBJECTS[0]), '"<|im_start|>"'))
    ours = Tokenizer.load(write(tmp_path / "model", byte_level_backend(), files))
    theirs = AutoTokenizer.from_pretrained(write(tmp_path / "oracle", byte_level_backend(), plain))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_a_map_beside_added_tokens_decoder_is_not_read(tmp_path: Path) -> None:
    files = {
        "tokenizer_config": {"added_tokens_decoder": added(special=False)},
        "special_tokens_map": {"additional_special_tokens": [token("<|im_start|>"), token("<image>")]},
    }
    path = write(tmp_path / "model", byte_level_backend(), files)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.special_token_ids == {0, 1, 2}


def test_markers_are_not_cut_into_letters(tmp_path: Path) -> None:
    path = write(tmp_path / "model", byte_level_backend(), VARIANTS["added_tokens_decoder"])
    assert len(Tokenizer.load(path).encode("<|im_start|>")) == 1
    assert Tokenizer.load(path).special_tokens["<|im_end|>"] == byte_level_backend().get_vocab_size() + 1


def test_named_tokens_reach_the_template(tmp_path: Path) -> None:
    files = {
        "tokenizer_config": {
            "image_token": "<image>",
            "bos_token": "<|user|>",
            "chat_template": "{{ bos_token }}{{ image_token }}",
        }
    }
    path = write(tmp_path / "model", byte_level_backend(), files)
    assert Tokenizer.load(path).render_chat([{"role": "user", "content": "a"}]) == "<|user|><image>"


def test_grammars_know_tokens_that_are_named_beside_the_file(tmp_path: Path) -> None:
    files = {**VARIANTS["added_tokens_decoder"], "generation_config": {}, "config": {}}
    files["tokenizer_config"] = {**files["tokenizer_config"], "eos_token": "<|im_end|>"}
    path = write(tmp_path / "model", byte_level_backend(), files)
    tokenizer = load_tokenizer(path, 400)
    assert isinstance(tokenizer, LLTokenizer)
    assert tokenizer.eos_token == Tokenizer.load(path).special_tokens["<|im_end|>"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": [1]}, r"added_tokens\.json"),
        ({"special_tokens_map": [1]}, r"special_tokens_map\.json"),
        ({"tokenizer_config": {"eos_token": 5}}, r"tokenizer\.json, or a file of the tokenizer beside it"),
        ({"tokenizer_config": {"added_tokens_decoder": {"5": 5}}}, "beside it"),
        (
            {"tokenizer_config": {"pad_token": "\ud83d"}},
            r"tokenizer_config\.json cannot be read: it contains half",
        ),
        ({"generation_config": {"\udc00": 5}}, r"generation_config\.json cannot be read: it contains half of a"),
    ],
)
def test_files_that_cannot_be_used_are_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model", byte_level_backend(), files)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(path)
