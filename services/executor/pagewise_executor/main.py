"""``pagewise-executor``: starts the executor service."""

import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
from pagewise_shared.config import ExecutorConfig, parse_config
from pagewise_shared.cpu_threads import CpuTimes, choose_threads, openmp_threads, wait_variables
from pagewise_shared.curve import Keys, leaves_host, load_keys
from pagewise_shared.errors import PagewiseError
from pagewise_shared.logs import configure_logging
from pagewise_shared.service_process import exit_code_of, run_event_loop, tune_allocator, warn_of_variables

from pagewise_executor.pool_check import check_pool
from pagewise_executor.runner import Runner
from pagewise_executor.service import ExecutorService
from pagewise_executor.worker import Worker

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    config = parse_config(
        ExecutorConfig,
        argv,
        prog="pagewise-executor",
        description="Hold a KV pool and run the step plans that a pagewise-scheduler sends.",
    )
    configure_logging(config.log_level, "executor")
    warn_of_variables()
    tune_allocator(computes=True, free_unused=_free_unused)
    os.environ.update(wait_variables(os.environ))  # the worker imports torch later
    # Without OSError: one that ends the worker may come from a disk or a device, and a restart may help.
    return exit_code_of(lambda: _serve(config), final=(PagewiseError, zmq.ZMQError))


def _free_unused() -> None:
    """Free the memory for results of the CPU operations that none has lain in since the last call."""
    # Not imported here: it imports torch, which the worker does in its own time, or never.
    if (results := sys.modules.get("pagewise_kernels.cpu.results")) is not None:
        results.free_unused()


def _serve(config: ExecutorConfig) -> None:
    """Load the model and run the service until it is told to stop.

    Raises:
        ConfigError: keys cannot be read, or are missing for an endpoint that leaves this host.
        ModelError: the model cannot be served.
        RefusedError: the scheduler does not let this executor join.
    """
    endpoint = next((each for each in (config.block_listen, config.scheduler) if each and leaves_host(each)), "ipc://")
    keys = load_keys(config.keys, config.key_name, endpoint, config.plaintext)  # before the model, which takes longer
    service = ExecutorService(
        Worker(lambda: _build_useful_runner(config, keys)),
        config.scheduler,
        config.executor_id or f"{socket.gethostname()}-{os.getpid()}",
        role=config.role,
        drain_timeout=config.drain_timeout,
        keys=keys,
    )
    run_event_loop(service.run())


def _build_useful_runner(config: ExecutorConfig, keys: Keys | None) -> Runner:
    """Build the runner, and see to it that clients can use it."""
    runner = build_runner(config, keys)
    info = runner.info
    check_pool(info.num_blocks, info.block_size, info.bytes_per_block, info.max_model_len)
    return runner


def build_runner(config: ExecutorConfig, keys: Keys | None = None) -> Runner:
    """Build the runner that ``config`` asks for. Torch is imported only if a model is run.

    Raises:
        ModelError: the model cannot be served.
    """
    if config.simulate:
        from pagewise_executor.simulated import SimulatedRunner

        return SimulatedRunner(config, config.simulate_step)
    log.info("starting torch")
    began = CpuTimes.now()
    # Imports make hundreds of thousands of objects that stay: looking for garbage among them took an eighth of their
    # time, and would take longer whenever the collector looks again while requests run.
    gc.disable()
    try:
        from pagewise_executor.kv.block_endpoint import block_listener
        from pagewise_executor.kv.peers import Peers
        from pagewise_executor.model_runner import ModelRunner
    finally:
        gc.freeze()
        gc.enable()
    if config.threads == "auto":
        threads = openmp_threads(os.environ) or choose_threads(began)
        config = msgspec.structs.replace(config, threads=threads)
        log.info("using %d CPU threads (set --threads for another number)", config.threads)
    folder = None if config.host_memory_dir == "none" else Path(config.host_memory_dir)
    if not config.lend_blocks:
        return ModelRunner(config, host_folder=folder)
    return ModelRunner(config, exchange=lambda store: Peers(store, *block_listener(config), keys), host_folder=folder)


if __name__ == "__main__":
    sys.exit(main())
