"""The tokens that end a model's output, and other special ones, as the files of its directory name them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pagewise_shared.errors import ModelError
from pagewise_shared.json_errors import why_not_json


def end_token_ids(path: Path, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return the end-of-sequence tokens of the model in a directory.

    ``token_to_id``: the id of a token that is given as text, None if there is none.

    Raises:
        ModelError: a file cannot be read.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found |= {token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0}
    named = tokenizer_settings(path).get("eos_token")
    if (text := token_text(named)) is not None and (token_id := token_to_id(text)) is not None:
        found.add(token_id)
    return frozenset(found)


def tokenizer_settings(path: Path) -> dict[str, Any]:
    """Return what the files beside tokenizer.json say of the tokenizer.

    Raises:
        ModelError: a file cannot be read.
    """
    return read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")


def untyped_special_tokens(path: Path) -> dict[str, Any]:
    """Return the texts of special tokens that these files have as objects without a type, by their names; of a list or
    an object of tokens, the whole.

    Older files have them. transformers refuses them in the file, and takes them as arguments.

    Raises:
        ModelError: the file cannot be read.
    """
    settings = read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # otherwise transformers does not read this file
        listed = read_json(path / "special_tokens_map.json").get("additional_special_tokens")
        settings |= {"additional_special_tokens": listed} if listed else {}
    found = {name: _without_object(token) for name, token in settings.items() if name.endswith("_token")}
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(tokens := settings.get(name), list):
            found[name] = list(map(_without_object, tokens))
        elif isinstance(tokens, dict):
            found[name] = {key: _without_object(token) for key, token in tokens.items()}
    return {name: value for name, value in found.items() if value != settings[name]}


def _without_object(token: Any) -> Any:
    """The text of a token that is an object without a type; any other one as it is."""
    is_untyped = isinstance(token, dict) and "__type" not in token and token_text(token) is not None
    return token_text(token) if is_untyped else token


def token_text(value: Any) -> str | None:
    """Return the text of a token in these files: it is a string, or an object that has it as its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file.

    Raises:
        ModelError: the file cannot be read.
    """
    if not path.is_file():
        return {}
    text = b""
    try:
        return msgspec.json.decode(text := path.read_bytes(), type=dict[str, Any])
    except (msgspec.ValidationError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read: {why_not_json(text, error)}") from error
