"""Model runners for tests."""

from pathlib import Path

from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import Runner
from pagewise_executor.tiers.host import HostTier
from pagewise_executor.tiers.peers import MakePeers, Peers
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import Keys
from pagewise_shared.protocol import HOST

from tests.cpu_kernels import auto_kernels
from tests.executor.driver import request, run_requests

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
        "kernels": auto_kernels() if device == "cpu" else "auto",
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


def peers_at(listen: str = "tcp://127.0.0.1:*", keys: Keys | None = None) -> MakePeers:
    """An exchange of blocks with other executors, at this endpoint."""
    return lambda tiers, bytes_per_block: Peers(tiers, bytes_per_block, listen, "127.0.0.1", keys)


def host_of(runner: ModelRunner) -> HostTier:
    """The host tier of a runner that has one."""
    host = runner._copier.tiers[HOST]
    assert isinstance(host, HostTier)
    return host


def tokens_and_logprobs(path: Path, dtype: str) -> tuple[dict[str, list[int]], list[float]]:
    """The tokens that a runner samples for a few prompts, and their log-probabilities."""
    runner = ModelRunner(ExecutorConfig(model=str(path), device="cpu", dtype=dtype, num_blocks=64, profile=False))
    requests = [request(list(range(5, 5 + n)), 12, f"r{n}", logprobs=0) for n in (3, 17, 40)]
    _, outputs = run_requests(runner, requests, max_num_batched_tokens=24)
    tokens = {one.request_id: one.sequences[0].output_token_ids.tolist() for one in requests}
    return tokens, [entry.logprob for output in outputs for entry in output.logprobs.values()]


def outputs(runner: Runner, prompts: dict[int, list[int]], **load: int) -> dict[str, list[tuple[int, float]]]:
    """Tokens and their log-probabilities, by request; ``prompts`` by seed."""
    requests = [request(prompt, 6, f"r{i}", temperature=1.0, seed=i, logprobs=0) for i, prompt in prompts.items()]
    _, steps = run_requests(runner, requests, **load)
    found: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for sequence, entry in step.logprobs.items():
            found.setdefault(sequence.request.request_id, []).append((entry.token_id, entry.logprob))
    return found
