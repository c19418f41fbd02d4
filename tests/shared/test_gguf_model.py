"""GGUF models: their files, and the folder with configuration, tokenizer and tensors that is made of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import tokenizers
from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_config import config_of
from pagewise_shared.gguf_model import make_folder, read_table
from pagewise_shared.model_files import fetch_model, local_model, resolve_model

from tests.gguf_models import build_gguf

LAYER = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    build_gguf(file, "llama", "Q8_0", **LAYER)
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagewise"


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(written, tmp_path / written.name))


def refused(file: Path) -> str:
    with pytest.raises(ModelError) as error:
        resolve_model(str(file))
    return str(error.value)


def test_a_file_becomes_a_folder_once(file: Path, cache: Path) -> None:
    expected = local_model(str(file))
    assert expected is not None
    assert not expected.exists()
    folder = resolve_model(str(file))
    assert folder == expected == resolve_model(str(file.parent)) == fetch_model(str(file), bars=False)
    assert [path.name for path in cache.iterdir()] == [folder.name]
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["head_dim"], config["quantization_config"]) == (
        "llama",
        64,
        {"quant_method": "gguf"},
    )
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    table = read_table(folder)
    assert table is not None
    assert (folder / file.name).resolve() == file
    reader = gguf.GGUFReader(file)
    assert {name: (one.start, one.size) for name, one in table.tensors.items()} == {
        one.name: (one.data_offset, one.n_bytes) for one in reader.tensors
    }
    assert table.tensors["blk.0.ffn_up.weight"].shape == [512, 256]
    file.touch()
    assert resolve_model(str(file)) != folder, "the file may be another one"
    with file.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(ModelError, match="has changed"):
        read_table(folder)


def test_the_tokenizer_is_that_of_the_file(file: Path) -> None:
    folder = resolve_model(str(file))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = backend.encode("then<end>")
    assert encoded.tokens == ["<bos>", "the", "n", "<end>"]
    assert backend.decode(encoded.ids[1:], skip_special_tokens=False) == "then<end>"
    assert backend.get_vocab_size() == 288, "no token is behind the weights"
    assert "{{ m.content }}<end>" in (folder / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("spaces", "expected"), [(True, "<s> \u2581the </s> \u2581the"), (False, "<s> t he </s> t he")]
)
def test_spaces_are_those_of_llama_cpp(spaces: bool, expected: str, tmp_path: Path) -> None:
    build_gguf(tmp_path / "m.gguf", "llama", "Q8_0", spaces=spaces, num_hidden_layers=1)
    backend = tokenizers.Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json"))
    encoded = backend.encode("the</s>the")
    assert encoded.tokens == expected.split()
    assert backend.decode(encoded.ids[1:2] if spaces else encoded.ids[1:3]) == "the"
    assert backend.encode(" the").tokens[-2:] == (["\u2581", "\u2581the"] if spaces else ["<s>", "\u2581the"])


def test_words_are_those_of_llama_cpp(tmp_path: Path) -> None:
    build_gguf(tmp_path / "m.gguf", "llama", "Q8_0", split="smollm", num_hidden_layers=1)
    backend = tokenizers.Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json"))
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("in 12 then")]
    assert pieces == ["in", "\u0120", "1", "2", "\u0120then"]
    build_gguf(tmp_path / "m.gguf", "llama", "Q8_0", split="deepseek-llm", num_hidden_layers=1)
    assert "and this one is gpt2, deepseek-llm" in refused(tmp_path / "m.gguf")


def test_split_files_are_one_model(file: Path) -> None:
    parts = [file.with_name(f"part-0000{n}-of-00002.gguf") for n in (1, 2)]
    shutil.copy(file, parts[0])
    assert "is split, and files are missing: part-00002-of-00002.gguf" in refused(parts[0])
    build_gguf(parts[0], "llama", "Q8_0", {"split.count": 2}, only="blk", **LAYER)
    build_gguf(parts[1], "llama", "Q8_0", {"split.count": 2}, only=("token_embd", "output"), **LAYER)
    folder = resolve_model(str(parts[1]))
    assert folder == resolve_model(str(parts[0]))
    table, whole = read_table(folder), read_table(resolve_model(str(file)))
    assert table is not None
    assert whole is not None
    assert table.tensors.keys() == whole.tensors.keys()
    assert {one.file for one in table.tensors.values()} == {part.name for part in parts}
    shutil.copy(parts[0], parts[1])
    assert "has a tensor of another file again: blk.0.attn_k.weight" in refused(parts[0])
    alone = shutil.copy(parts[0], file.with_name("alone.gguf"))
    assert "is one of 2 files" in refused(Path(alone))


def test_damaged_files_are_refused_by_name(file: Path) -> None:
    data = file.read_bytes()
    for content, why in (
        (data[: len(data) // 2], "is truncated or damaged"),
        (data[:2000], "is truncated or damaged"),
        (b"GGUF" + (9).to_bytes(4, "little") + data[8:], "version 9"),
        (b"PK" + data[2:], "is no GGUF file"),
        (b"", "is no GGUF file"),
    ):
        file.write_bytes(content)
        found = refused(file)
        assert str(file) in found
        assert why in found
    assert not list(file.parent.glob("cache/pagewise/*")), "nothing is left behind"


def test_files_for_other_machines_are_refused(tmp_path: Path) -> None:
    build_gguf(tmp_path / "m.gguf", "llama", "Q8_0", big_endian=True, **LAYER)
    assert "of the other byte order" in refused(tmp_path / "m.gguf")


FIELDS: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 4096, "llama.embedding_length": 256,
    "llama.block_count": 2, "llama.feed_forward_length": 512, "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
SHAPES = {"token_embd.weight": [1000, 256]}


def test_what_files_leave_out_has_the_defaults_of_llama_cpp() -> None:
    config = config_of("m.gguf", FIELDS, SHAPES)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config["head_dim"], config["num_key_value_heads"], config["vocab_size"]) == (64, 4, 1000)
    assert config["tie_word_embeddings"]
    assert not config_of("m.gguf", FIELDS, SHAPES | {"output.weight": [1000, 256]})["tie_word_embeddings"]
    assert config_of("m.gguf", FIELDS, SHAPES | {"blk.0.ffn_down.bias": [256]})["mlp_bias"]
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_of("m.gguf", FIELDS | linear, SHAPES)["rope_parameters"]["factor"] == 4.0


def test_files_of_glm_count_the_mtp_layer_and_may_not_choose_experts_otherwise() -> None:
    own = {
        "block_count": 3, "nextn_predict_layers": 1, "rope.dimension_count": 32, "expert_count": 8,
        "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1, "expert_weights_norm": True,
        "expert_weights_scale": 2.5, "leading_dense_block_count": 1, "expert_gating_func": 2,
    }  # fmt: skip
    fields = {name.replace("llama.", "glm4moe."): value for name, value in FIELDS.items()}
    fields |= {"general.architecture": "glm4moe"} | {f"glm4moe.{name}": value for name, value in own.items()}
    config = config_of("m.gguf", fields, SHAPES | {"blk.0.attn_q.bias": [256]})
    assert (config["num_hidden_layers"], config["attention_bias"], config["use_qk_norm"]) == (2, True, False)
    assert (config["rope_parameters"]["partial_rotary_factor"], config["n_routed_experts"]) == (0.5, 8)
    with pytest.raises(ModelError, match=r"chooses experts by glm4moe\.expert_gating_func = 1"):
        config_of("m.gguf", fields | {"glm4moe.expert_gating_func": 1}, SHAPES)


def test_factors_of_rope_are_those_of_llama_3() -> None:
    """As Llama 3.2 has them, from transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope), "cpu"
    )
    plain = [rope["rope_theta"] ** (-2 * pair / 64) for pair in range(32)]  # type: ignore[operator]
    factors = [one / float(slow) for one, slow in zip(plain, theirs, strict=True)]
    fields = FIELDS | {"llama.rope.freq_base": 500_000.0}
    found = config_of("m.gguf", fields, SHAPES, factors)["rope_parameters"]
    assert found == rope | {"factor": pytest.approx(32.0)}
    with pytest.raises(ModelError, match="not those of Llama 3"):
        config_of("m.gguf", fields, SHAPES, [1.0, *factors[:-1]])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"general.architecture": "falcon"}, "architectures llama, qwen2, qwen3.*, and this one is of falcon"),
        ({"llama.expert_count": 8}, "has no number llama.expert_used_count"),
        ({"llama.expert_weights_scale": 2.5}, "sets llama.expert_weights_scale = 2.5, which is not known"),
        ({"llama.block_count": None}, "has no number llama.block_count"),
        ({"llama.feed_forward_length": [1, 2]}, "has no number llama.feed_forward_length"),
        ({"llama.rope.dimension_count": 32}, "heads of 64 and llama.rope.dimension_count = 32"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE of type yarn"),
    ],
)
def test_what_is_not_known_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        config_of("m.gguf", FIELDS | fields, SHAPES)
    with pytest.raises(ModelError, match="no tensor token_embd"):
        config_of("m.gguf", FIELDS, {})


def test_a_format_of_a_repository_is_downloaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(model: str, **options: Any) -> str:
        asked.append((model, options["allow_patterns"]))
        return str(file.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name:Q8_0") == make_folder([file])
    assert asked == [("owner/name", ["*Q8_0.gguf", "*Q8_0-00*.gguf"])]
    with pytest.raises(ModelError, match="whose name ends with Q4_0 is wanted in owner/name:Q4_0, and there is none"):
        resolve_model("owner/name:Q4_0", tokenizer_only=True)
