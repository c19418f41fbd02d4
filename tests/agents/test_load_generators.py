"""A load generator of the documents measures Pagewise by the command that they give."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pagewise_shared.model_files import resolve_model

from benchmarks import environments
from benchmarks.processes import serving

pytestmark = [pytest.mark.agents, pytest.mark.long, pytest.mark.timeout(900)]
DOCUMENT = Path(__file__).parents[2] / "docs" / "bench.md"


def test_guidellm_measures_as_the_documents_say(tmp_path: Path) -> None:
    try:
        packages = environments.packages(Path(__file__).with_name("clients") / "guidellm.txt")
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"GuideLLM cannot be installed: {error}")
    found = re.search(r"^guidellm (run (?:.*\\\n)*.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert found is not None
    with serving("--simulate", "--simulate-step=0.005") as server:
        changes = {
            "http://127.0.0.1:8000": server.url,
            "Qwen/Qwen3-0.6B": str(resolve_model("pagewise-demo")),
            "count=200": "count=20",
            "prompt_tokens=512": "prompt_tokens=128",
            "output_tokens=128": "output_tokens=32",
        }
        command = found[1].replace("\\\n", " ")
        for old, new in changes.items():
            assert old in command
            command = command.replace(old, new)
        done = subprocess.run(
            [sys.executable, "-m", "guidellm", *shlex.split(command), "--disable-console-interactive"],
            env=os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        generated = server.metric("generation_tokens_total")
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    assert len(requests) == 20
    assert {one["output_metrics"]["total_tokens"] for one in requests} == {32}
    assert not benchmark["requests"]["errored"]
    assert generated >= 20 * 32
