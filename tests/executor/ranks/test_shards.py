"""Which part of a model each rank holds."""

from typing import Any

import pytest
import torch
from pagewise_executor.collectives import Ranks
from pagewise_executor.models.shard_settings import shard_config
from pagewise_executor.models.shards import (
    LLAMA_PLAN,
    ShardedEmbedding,
    Shards,
    UnknownShardError,
    VocabularyNames,
)
from pagewise_shared.errors import ModelError
from transformers import LlamaConfig, ModernBertDecoderConfig, Qwen3MoeConfig

EXPERTS = "model.layers.*.mlp.experts"
PLAN = LLAMA_PLAN | {f"{EXPERTS}.gate_up_proj": "packed_colwise", f"{EXPERTS}.down_proj": "rowwise"}


class Weight:
    """A weight in a file, which counts the bytes read."""

    def __init__(self, *shape: int) -> None:
        self.whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        self.read = 0

    def get_shape(self) -> list[int]:
        return list(self.whole.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        part: torch.Tensor = self.whole[index]  # type: ignore[index]
        self.read += part.numel()
        return part


def parts(weight: Weight, name: str, shape: list[int], size: int) -> list[torch.Tensor]:
    names = VocabularyNames("model.embed_tokens", "lm_head")
    return [Shards(Ranks(rank, size), PLAN, names).read(weight, name, shape) for rank in range(size)]


def test_columns_and_rows_are_divided_and_only_they_are_read() -> None:
    up, down = Weight(8, 6), Weight(6, 8)
    assert torch.equal(torch.cat(parts(up, "model.layers.3.mlp.up_proj.weight", [4, 6], 2)), up.whole)
    assert up.read == up.whole.numel()
    rows = parts(down, "model.layers.0.mlp.down_proj.weight", [6, 2], 4)
    assert torch.equal(torch.cat(rows, dim=1), down.whole)
    assert down.read == down.whole.numel()


def test_the_vocabulary_is_cut_by_tokens_whatever_the_plan_says_of_the_head() -> None:
    names, head = VocabularyNames("model.embed_tokens", "lm_head"), Weight(5, 3)
    for style in ("colwise_gather_output", "colwise", "rowwise"):
        cut = [
            Shards(Ranks(rank, 2), {"lm_head": style}, names).read(head, "lm_head.weight", [3, 3]) for rank in range(2)
        ]
        assert torch.equal(torch.cat(cut)[:5], head.whole), style


def test_kv_heads_that_are_fewer_than_ranks_are_shared_by_neighbours() -> None:
    keys = Weight(2 * 4, 6)  # two heads of four
    found = parts(keys, "model.layers.0.self_attn.k_proj.weight", [4, 6], 4)
    assert [int(part[0, 0]) for part in found] == [0, 0, 24, 24]
    bias = parts(Weight(8), "model.layers.0.self_attn.k_proj.bias", [4], 4)
    assert [part.tolist() for part in bias] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_a_bias_behind_a_sum_counts_once() -> None:
    found = parts(Weight(6), "model.layers.0.self_attn.o_proj.bias", [6], 3)
    assert torch.equal(torch.stack(found).sum(0), Weight(6).whole)


def test_the_vocabulary_is_divided_with_zeros_at_its_end() -> None:
    head = Weight(7, 3)
    found = torch.cat(parts(head, "lm_head.weight", [2, 3], 4))
    assert torch.equal(found[:7], head.whole)
    assert not found[7:].any()


@pytest.mark.parametrize("joined", [True, False])
def test_each_expert_is_divided(joined: bool) -> None:
    whole = Weight(3, 8, 5)  # gate and up of three experts, four wide
    name, shape = "model.layers.1.mlp.experts.gate_up_proj", [3, 4, 5]
    gate, up = whole.whole[:, :4], whole.whole[:, 4:]
    expected = [torch.cat([gate[:, cut], up[:, cut]], dim=1) for cut in (slice(0, 2), slice(2, 4))]
    if not joined:
        found = parts(whole, name, shape, 2)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        return
    one = Weight(4, 5)  # the gate of one expert, as checkpoints have it
    assert [part.tolist() for part in parts(one, name, shape, 2)] == [one.whole[:2].tolist(), one.whole[2:].tolist()]


def test_what_the_plan_does_not_explain_is_refused() -> None:
    with pytest.raises(UnknownShardError, match=r"its weight model.layers.0.other.weight is divided"):
        parts(Weight(8, 2), "model.layers.0.other.weight", [4, 2], 2)


def test_the_inputs_of_a_sum_have_to_be_divided() -> None:
    """Otherwise each rank would add the whole sum."""
    with pytest.raises(UnknownShardError, match=r"o_proj.weight is divided \(style 'rowwise', \[4, 8\] in the file"):
        parts(Weight(4, 8), "model.layers.0.self_attn.o_proj.weight", [4, 8], 2)


def test_an_embedding_of_parts_is_that_of_the_whole() -> None:
    whole = torch.nn.Embedding(7, 3)
    ids = torch.tensor([[0, 6, 3, 2]])
    total = torch.zeros(1, 4, 3)
    for rank in range(2):
        own = torch.nn.Embedding(4, 3)
        own.weight.data = torch.cat([whole.weight.data, torch.zeros(1, 3)])[4 * rank : 4 * rank + 4]
        ranks = Ranks(rank, 2)
        ranks.reduce = lambda x: x  # type: ignore[method-assign]
        total += ShardedEmbedding(own, 4, ranks)(ids)
    assert torch.equal(total, whole(ids))


@pytest.mark.parametrize(
    ("settings", "size", "flaw"),
    [
        ({}, 3, "num_attention_heads is 8; numbers of ranks that work: 1, 2, 4"),
        ({"intermediate_size": 90}, 4, "intermediate_size is 90; numbers of ranks that work: 1, 2"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96},
            2,
            "num_key_value_heads is 3; numbers of ranks that work: 1, 3, 6, 12",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(settings: dict[str, int], size: int, flaw: str) -> None:
    config = LlamaConfig(**({"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 100} | settings))
    with pytest.raises(ModelError, match=flaw):
        shard_config("a model", config, size)


def test_no_part_has_a_token_for_padding() -> None:
    """transformers makes the embedding of this token zero, which is another one in each part."""
    config = LlamaConfig(pad_token_id=2)
    shard_config("a model", config, 2)
    assert config.pad_token_id is None
    with pytest.raises(ModelError, match=r"of a model has to have a pad_token_id"):
        shard_config("a model", ModernBertDecoderConfig(), 2)


def test_sizes_of_each_layer_are_divided() -> None:
    config: Any = LlamaConfig(num_attention_heads=8, num_key_value_heads=4)
    config.num_attention_heads_per_layer = [8, 4]
    shard_config("a model", config, 2)
    assert config.num_attention_heads_per_layer == [4, 2]
    with pytest.raises(ModelError, match=r"heads_per_layer is \[4, 2\]; numbers of ranks that work: 1, 2"):
        shard_config("a model", config, 4)


def test_experts_have_to_divide() -> None:
    config = Qwen3MoeConfig(moe_intermediate_size=6, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ModelError, match="moe_intermediate_size is 6"):
        shard_config("a model", config, 4)


def test_an_adapter_is_cut_as_its_layer_is() -> None:
    names, layer = VocabularyNames("model.embed_tokens", "lm_head"), "model.layers.1"
    a, b = torch.randn(3, 8), torch.randn(12, 3)
    for rank in range(2):
        shards = Shards(Ranks(rank, 2), PLAN | {"model.layers.*.mlp.both": "packed_colwise"}, names)
        shards.read(Weight(12, 8), f"{layer}.mlp.up_proj.weight", [6, 8])
        assert shards.whole_shape(f"{layer}.mlp.up_proj", (6, 8)) == (12, 8)
        assert shards.whole_shape(f"{layer}.mlp.gate", (5, 8)) == (5, 8), "what all ranks hold is whole"
        whole_a, rows = shards.cut_adapter(f"{layer}.mlp.up_proj", a, b, (6, 8))
        assert torch.equal(whole_a, a)
        assert torch.equal(rows, b[6 * rank : 6 * rank + 6])
        columns, whole_b = shards.cut_adapter(f"{layer}.mlp.down_proj", a, b, (12, 4))
        assert torch.equal(columns, a[:, 4 * rank : 4 * rank + 4])
        assert torch.equal(whole_b, b)
        _, halves = shards.cut_adapter(f"{layer}.mlp.both", a, b, (6, 8))
        assert torch.equal(halves, torch.cat([b[3 * rank : 3 * rank + 3], b[6 + 3 * rank : 9 + 3 * rank]]))
