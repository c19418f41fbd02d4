"""Model runners for tests."""

from pathlib import Path

from pagewise_executor.kv.host_tier import HostTier
from pagewise_executor.kv.peers import MakePeers
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import HOST

BLOCK_SIZE = 8


def build_runner(
    path: Path,
    device: str = "cpu",
    exchange: MakePeers | None = None,
    host_folder: Path | None = None,
    **options: object,
) -> ModelRunner:
    """A runner with small blocks and a host tier that verifies its copies."""
    settings = {
        "dtype": "float32",
        # Also in processes that a test starts, where OpenVINO may be installed.
        "kernels": "torch" if device == "cpu" else "auto",
        "block_size": BLOCK_SIZE,
        "num_blocks": 400,
        "host_memory": "4MiB",
        "verify_copies": True,
        "profile": False,
    }
    return ModelRunner(
        ExecutorConfig(model=str(path), device=device, **(settings | options)),  # type: ignore[arg-type]
        exchange=exchange,
        host_folder=host_folder,
    )


def host_of(runner: ModelRunner) -> HostTier:
    """The host tier of a runner that has one."""
    host = runner._tiers[HOST]
    assert isinstance(host, HostTier)
    return host
