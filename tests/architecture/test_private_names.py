"""The product uses no private name of a dependency, except a short list, which refuses other versions."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("private_names", ROOT / ".ci" / "private_names.py")
assert _SPEC is not None
assert _SPEC.loader is not None
private_names = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(private_names)

FOUND = {
    "import torch._C": "torch._C",
    "import torch._inductor.config as c": "torch._inductor.config",
    "from aiohttp._http_parser import HttpRequestParser": "aiohttp._http_parser.HttpRequestParser",
    "import torch\ntorch._C._cuda_getDriverVersion()": "torch._C._cuda_getDriverVersion",
    "import torch\ntorch.ops.mkldnn._linear_pointwise": "torch.ops.mkldnn._linear_pointwise",
    "from torch import nn as n\nn._reduction": "torch.nn._reduction",
    "import triton\ndriver = triton.runtime.driver\nprint(driver._active)": "driver._active",
    "def f(model):\n    model._init_weights()": "model._init_weights",
    "def f(module, hooks):\n    module._forward_hooks = hooks": "module._forward_hooks",
    "class A:\n    def f(self, b):\n        return b.c()._d": "b.c()._d",
    "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        return self._buffers": "self._buffers",
    "from aiohttp import web\nclass A(web.RequestHandler):\n    def f(self):\n        return self._buffer_paused":
        "self._buffer_paused",
    "from aiohttp import web\nclass A(web.RequestHandler):\n    def f(self):\n     super()._resume_transport_reading()":
        "super()._resume_transport_reading",
    "from aiohttp import web\nclass A(web.RequestHandler):\n    def _resume_transport_reading(self):\n        pass":
        "web.RequestHandler._resume_transport_reading",
    "from aiohttp import web\nclass A(web.RequestHandler):\n    def __init__(self):\n        self._parser = None":
        "web.RequestHandler._parser",
    "import torch.nn\nclass A(torch.nn.Module):\n    def __init__(self):\n        self._parameters = {}":
        "torch.nn.Module._parameters",
    "def f(model):\n    return getattr(model, '_tp_plan', None)": "getattr('_tp_plan')",
    "import operator\noperator.attrgetter('config._attn')": "attrgetter('config._attn')",
    "import importlib\nimportlib.import_module('torch._C')": "import_module('torch._C')",
    "def f(model):\n    return model.__dict__['_modules']": "model.__dict__['_modules']",
    "def f(model):\n    return vars(model)['_modules']": "vars(model)['_modules']",
}  # fmt: skip

ALLOWED = [
    "import os\nos._exit(0)",
    "from __future__ import annotations",
    "from typing import NamedTuple\nclass A(NamedTuple):\n    b: int\nA(1)._replace(b=2)._asdict()",
    "class A:\n    _b: int\n    def f(self, other):\n        return self._b + other._b",
    "class A:\n    def __init__(self):\n        self._b = 1\ndef f(a):\n    return a._b",
    "class A:\n    def f(self):\n        return self._b\nclass B(A):\n    def __init__(self):\n        self._b = 1",
    "class A:\n    __slots__ = ('_b',)\n    def __init__(self):\n        self._b = getattr(self, '_b', 1)",
    "from torch import nn\nclass A(nn.Module):\n    def __init__(self):\n        self._own = 1\n        f(self._own)",
    "from pagewise_executor.kv import _own",
    "for _ in range(3):\n    _",
]


def found(tmp_path: Path, source: str) -> list[str]:
    (tmp_path / "file.py").write_text(source)
    return [hit.name for hit in private_names.find([tmp_path / "file.py"], tmp_path)]


@pytest.mark.parametrize(("source", "name"), FOUND.items(), ids=FOUND.values())
def test_each_kind_of_private_name_is_found(
    source: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in found(tmp_path, source)
    assert private_names.main([str(tmp_path)]) == 1
    assert f"{name} is a private name of a dependency" in capsys.readouterr().out


@pytest.mark.parametrize("source", ALLOWED)
def test_documented_names_and_one_s_own_are_not(source: str, tmp_path: Path) -> None:
    assert found(tmp_path, source) == []
    assert private_names.main([str(tmp_path)]) == 0


def test_the_product_uses_those_on_the_list_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = dict(private_names.ALLOWED)
    monkeypatch.setattr(private_names, "ALLOWED", {})
    files = [path for folder in private_names.PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert {(hit.path.name, hit.name) for hit in private_names.find(files, ROOT)} == listed.keys()


def test_the_versions_that_were_tried_are_those_that_the_product_allows() -> None:
    for allowed in private_names.ALLOWED.values():
        assert allowed.why
        module, _, name = allowed.guard.partition(":")
        guard = getattr(importlib.import_module(module), name)
        first, last = (".".join(map(str, one)) if isinstance(one, tuple) else one for one in (guard[0], guard[-1]))
        tried = re.findall(r"\d[\d.]*\d", allowed.tried)
        assert (tried[0], tried[-1]) == (first, last)
