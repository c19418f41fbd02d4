"""Options that change the model that executors serve."""

import json
from pathlib import Path
from typing import Any

import pytest
from pagewise.cluster.plan import PlanError, Served, difference
from pagewise.cluster.running import check_served
from pagewise_shared.config import ExecutorConfig

PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LONGROPE: dict[str, Any] = {"rope_scaling": {"type": "longrope", "factor": 4.0}}
DYNAMIC: dict[str, Any] = {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}}
QUANTISED: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}


def found(settings: dict[str, Any], **options: Any) -> str:
    base: dict[str, Any] = {"model": "/models/a"}
    return difference(Served.by(ExecutorConfig(**base)), Served.by(ExecutorConfig(**base | options)), lambda: settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "/models/b"}, "MODEL /models/a, and not /models/b"),
        ({"revision": "v2"}, "--revision None, and not v2"),
        ({"quantization": "int8"}, "--quantization none, and not int8"),
        ({"simulate": True}, "--simulate False, and not True"),
    ],
)
def test_other_weights_are_another_model_whatever_they_are(options: dict[str, Any], said: str) -> None:
    assert found(PLAIN, **options) == said


@pytest.mark.parametrize(("settings", "is_other"), [(PLAIN, False), (LONGROPE, False), (DYNAMIC, True)])
def test_another_length_is_another_model_if_its_rope_depends_on_it(settings: dict[str, Any], is_other: bool) -> None:
    said = found(settings, max_model_len=4096)
    assert ("--max-model-len None, and not 4096" in said) == is_other == bool(said)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"device": "cuda"}, {"kernels": "torch"}])
def test_where_it_is_computed_matters_to_quantised_models(options: dict[str, Any]) -> None:
    assert found(PLAIN, **options) == ""
    assert found(QUANTISED, **options).endswith("(on which the tokens of a quantised model depend)")
    int8 = [Served.by(ExecutorConfig(quantization="int8", **more)) for more in ({}, options)]
    assert difference(*int8, lambda: PLAIN)


@pytest.mark.parametrize("options", [{"num_blocks": 7}, {"max_num_seqs": 3}, {"dtype": "bfloat16"}])
def test_other_options_change_while_it_runs(options: dict[str, Any]) -> None:
    assert found(DYNAMIC | QUANTISED, **options) == ""


def test_a_difference_is_refused_with_what_to_do(tmp_path: Path) -> None:
    old, new = Served(model=str(tmp_path)), Served(model=str(tmp_path), max_model_len=4096)
    with pytest.raises(PlanError, match=r"it is unknown here .*config.json cannot be read.* down --name mine"):
        check_served("mine", old, new)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    check_served("mine", old, new)
    (tmp_path / "config.json").write_text(json.dumps(DYNAMIC))
    with pytest.raises(PlanError, match=r"--max-model-len None, and not 4096 .* down --name mine"):
        check_served("mine", old, new)
