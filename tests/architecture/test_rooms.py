"""The house rules that a tool can check: imports between rooms, modules never loaded, and lengths of files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = [
    "shared",
    "kernels",
    "services",
    "services/gateway",
    "services/scheduler",
    "services/executor",
    "services/cli",
]
FOLDERS = ["shared", "kernels", "services", "benchmarks", "docs", "examples"]
"""All that is not a test."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = {"kernels": 150}
DEFAULT_FUNCTION_LINES = 60
_CORE = "services/scheduler/pagewise_scheduler/core"
LONGER_FILES: dict[str, str] = {
    "services/executor/pagewise_executor/model_runner.py": "a step, from its plan to its result",
    f"{_CORE}/scheduling/scheduler.py": "one class: what a request, a step and a result change are read together",
    "shared/pagewise_shared/config/options.py": "the options of every command",
    "shared/pagewise_shared/protocol/gateway_messages.py": "every message between gateways and the scheduler",
}
"""Files that may be longer, each with the reason."""


def sources() -> list[Path]:
    return sorted(path for room in ("shared", "kernels", "services") for path in (ROOT / room).rglob("*.py"))


def test_import_contracts_hold() -> None:
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module", ["pagewise_gateway.main", "pagewise_scheduler.main", "pagewise_shared.model_files", "pagewise.main"]
)
def test_only_the_executor_loads_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'triton'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_scheduler_loads_neither_text_nor_http() -> None:
    # Its memory is one of the reasons why gateways are processes of their own.
    kept_out = {"aiohttp", "transformers", "tokenizers", "jinja2", "huggingface_hub"}
    code = f"import sys, pagewise_scheduler.main; loaded = {kept_out} & set(sys.modules); assert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_and_simulation_do_not_load_torch() -> None:
    code = (
        "import sys; from pagewise_executor.main import build_runner; "
        "from pagewise_shared.config import ExecutorConfig; build_runner(ExecutorConfig(simulate=True)); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_room_is_importable_by_its_bare_name() -> None:
    # transformers looks for a library called ``kernels``, and would find ours.
    assert not [room for room in ROOMS if (ROOT / room / "__init__.py").exists()]


def test_no_module_is_called_utils() -> None:
    assert not [path for path in sources() if path.stem in {"utils", "util", "helpers", "misc", "common"}]


def test_files_and_functions_stay_short() -> None:
    too_long = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_FILE_LINES and name not in LONGER_FILES:
            too_long.append(f"{name} has {lines} lines")
        limit = MAX_FUNCTION_LINES.get(name.split("/")[0], DEFAULT_FUNCTION_LINES)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > limit:
                    too_long.append(f"{name}:{node.lineno} {node.name} has {size} lines")
    assert not too_long


def test_exceptions_to_the_ratchet_are_still_needed() -> None:
    for name in LONGER_FILES:
        assert (ROOT / name).read_text().count("\n") > MAX_FILE_LINES, f"{name} needs no exception any more"


def test_nothing_is_pickled() -> None:
    assert not [p for p in sources() if "pickle" in p.read_text()]


def test_nothing_is_imported_from_tests_but_what_they_share() -> None:
    """Helpers of several test files are in a module that is no test file. Benchmarks run without the tests."""
    imports = re.compile(r"^\s*(?:from|import) +(?:\S+\.)?test_|^\s*from +tests\b.* import .*\btest_", re.MULTILINE)
    outside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    every_module = [*outside, *(ROOT / "tests").rglob("*.py")]
    offenders = {str(path.relative_to(ROOT)) for path in every_module if imports.search(path.read_text())}
    assert offenders == {"tests/fuzz/guided.py"}, "only that one runs a test as it is"
    assert not [path for path in outside if re.search(r"^\s*(?:from|import) +tests\b", path.read_text(), re.MULTILINE)]


def test_what_the_guided_fuzzer_runs_is_there() -> None:
    """No test imports it where atheris is not installed, so a renamed test would go unnoticed."""
    fuzz = ROOT / "tests" / "fuzz"
    (name,) = re.findall(r"^from tests\.fuzz\.test_plans import (\w+)", (fuzz / "guided.py").read_text(), re.MULTILINE)
    assert f"def {name}(" in (fuzz / "test_plans.py").read_text()
