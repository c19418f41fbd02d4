"""A server whose model is scripted: a scheduler, a gateway and an executor as processes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Cluster, Process, wait_until
from tests.gateway.http.tool_model import SPECIAL, TEMPLATE
from tests.gateway.text.tokenizer_builders import byte_level_backend, write_model

MODEL = "scripted"
KEY = "sk-tests"
_EXECUTOR = Path(__file__).with_name("scripted_executor.py")


@dataclass(frozen=True)
class Scripted:
    """The server's address, and its model's name."""

    url: str
    model: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find it."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "MODEL": self.model,
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def scripted_server(folder: Path) -> Iterator[Scripted]:
    """A running server. Its model writes the script's text (``scripted_executor``)."""
    model = write_model(
        folder / "model",
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE},
        config={"eos_token_id": 0},
    )
    byte_level_backend(SPECIAL).save(str(model / "tokenizer.json"))
    keys = folder / "api-keys"
    keys.write_text(f"tests: {KEY} operator=yes\n")
    keys.chmod(0o600)
    name = f"--served-model-name={MODEL}"
    options = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3")
    comments = "--sse-keep-alive-interval=0.001"  # clients see comments and pings between all events
    cluster = Cluster(
        folder,
        model=str(model),
        scheduler_options=(name,),
        gateway_options=(name, f"--api-keys-file={keys}", *options, comments),
        api_key=KEY,
    )
    try:
        cluster.start()
        command = [sys.executable, str(_EXECUTOR), str(model), f"--scheduler={cluster.endpoint}", "--max-num-seqs=8"]
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        executor = Process("executor", command, folder, paths)
        cluster.executors.append(executor)
        wait_until(lambda: cluster.executors_ready() == 1, 60, "the executor is ready", executor)
        yield Scripted(cluster.url, MODEL, KEY)
    finally:
        cluster.close()
