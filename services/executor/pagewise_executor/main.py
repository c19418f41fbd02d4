"""``pagewise-executor``: starts the executor service."""

import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from pagewise_shared.config import ExecutorConfig, parse_config
from pagewise_shared.cpu_threads import CpuTimes, choose_threads, share_of_cores, wait_variables
from pagewise_shared.curve import Keys, leaves_host, load_keys
from pagewise_shared.errors import ModelError, PagewiseError
from pagewise_shared.logs import configure_logging
from pagewise_shared.model_files import local_model
from pagewise_shared.service_process import exit_code_of, run_event_loop, tune_allocator, warn_of_variables
from pagewise_shared.start_checks import check_pool, check_start

from pagewise_executor.device_defaults import with_threads
from pagewise_executor.process_end import End, end_process, end_with_threads
from pagewise_executor.read_ahead import read_ahead
from pagewise_executor.runner import Runner
from pagewise_executor.service import ExecutorService
from pagewise_executor.worker import Worker

if TYPE_CHECKING:
    from pagewise_executor.collectives import Ranks
    from pagewise_executor.ranks.leader import Leader
    from pagewise_executor.ranks.messages import RankSpec

# Not __name__, which is "__main__" in the process that runs this module.
log = logging.getLogger("pagewise_executor.main")

FINAL = (PagewiseError, zmq.ZMQError)
"""Errors after which another start would fail too. Without OSError: a failing disk or device may raise it in the
worker, and a restart may help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    config = parse_config(
        ExecutorConfig,
        argv,
        prog="pagewise-executor",
        description="Hold a KV pool and run the step plans that a pagewise-scheduler sends.",
    )
    configure_logging(config.log_level, "executor", config.log_format)
    warn_of_variables()
    tune_allocator(computes=True, free_unused=free_unused)
    end_with_threads()
    os.environ.update(wait_variables(os.environ))  # the worker imports torch later
    if config.node_rank:
        codes: list[int] = []
        return exit_code_of(lambda: codes.append(_follow(config)), final=FINAL) or codes[0]
    return exit_code_of(lambda: _serve(config), final=FINAL)


def free_unused() -> None:
    """Free the result buffers of the CPU operations that have not been used since the last call."""
    # Not imported here: it imports torch, which the worker does later, and a simulated runner does not need.
    if (results := sys.modules.get("pagewise_kernels.cpu.library")) is not None:
        results.free_unused()


def _serve(config: ExecutorConfig) -> None:
    """Load the model and run the service until it is stopped.

    Raises:
        ConfigError: keys cannot be read, or are missing for an endpoint that leaves this host, or the store does not
            answer.
        ModelError: the model cannot be served.
        RefusedError: the scheduler does not let this executor join.
    """
    keys = load_keys(config.keys, config.key_name, endpoint_to_protect(config), config.plaintext)  # before the model
    check_start(config)
    service = ExecutorService(
        Worker(lambda: _build_useful_runner(config, keys)),
        config.scheduler,
        config.executor_id or f"{socket.gethostname()}-{os.getpid()}",
        role=config.role,
        drain_timeout=config.drain_timeout,
        keys=keys,
    )
    run_event_loop(service.run())


def _follow(config: ExecutorConfig) -> int:
    """Run this node's ranks of an executor whose rank 0 is on another node; returns the process's exit code.

    Raises:
        ConfigError: keys cannot be read, or are missing for an endpoint that leaves this host.
        RefusedError: node 0 rejects this node.
    """
    from pagewise_executor.ranks.node import Node

    return Node(config, load_keys(config.keys, config.key_name, endpoint_to_protect(config), config.plaintext)).run()


def endpoint_to_protect(config: ExecutorConfig) -> str:
    """Return an endpoint that leaves this host, so that the executor needs keys; else one on this host."""
    endpoints = [config.block_listen, None if config.node_rank else config.scheduler]
    if config.nnodes > 1:
        endpoints.append(f"tcp://{config.master_addr}:{config.master_port}")
    return next((each for each in endpoints if each and leaves_host(each)), "ipc://")


def _build_useful_runner(config: ExecutorConfig, keys: Keys | None) -> Runner:
    """Build the runner, and check that its KV pool is large enough for requests."""
    runner = build_runner(config, keys) if config.tensor_parallel == 1 else lead(config, keys)
    info = runner.info
    # Per rank, as --kv-memory is.
    block_bytes = info.bytes_per_block // config.tensor_parallel
    check_pool(info.num_blocks, info.block_size, block_bytes, info.max_model_len)
    return runner


def lead(config: ExecutorConfig, keys: Keys | None = None, lost: End | None = None) -> Runner:
    """Start the other ranks of this executor, or wait for the nodes that start them, and build rank 0's runner.

    ``lost``: called when a rank is lost; None: this process ends then.

    Raises:
        ConfigError: other nodes cannot join where the options say.
        ModelError: the model cannot be served.
        TimeoutError: other nodes have not joined.
    """
    from pagewise_executor.ranks.leader import Leader
    from pagewise_executor.ranks.nodes import Nodes

    nodes = None
    if config.nnodes > 1:
        try:
            nodes = Nodes(config, keys)
            print(f"ranks {nodes.endpoint}", flush=True)  # for the starter of the other nodes, as ``listening``
            nodes.gather()
        except TimeoutError as error:
            (lost or end_process)(str(error), 1)
            raise
    on_host = nodes.on_host if nodes is not None else config.tensor_parallel
    config = with_threads(config, lambda: share_of_cores(on_host))
    leader = Leader(config, lost or end_process, nodes)
    try:
        return build_runner(config, keys, leader=leader)
    except BaseException:
        leader.kill()
        raise


def build_runner(
    config: ExecutorConfig, keys: Keys | None = None, spec: "RankSpec | None" = None, leader: "Leader | None" = None
) -> Runner:
    """Build the runner that ``config`` asks for. Torch is imported only if a model is run.

    ``spec``: describes this rank, if it is one of several behind rank 0. ``leader``: of the other ranks, if this is
    rank 0.

    Raises:
        ModelError: the model cannot be served.
    """
    if config.simulate:
        from pagewise_executor.simulated import SimulatedRunner

        return SimulatedRunner(config, config.simulate_step)
    log.info("starting torch")
    if (folder := local_model(config.model)) is not None:
        read_ahead(folder)
    began = CpuTimes.now()
    # Imports make hundreds of thousands of objects that stay: the garbage collector took an eighth of their time, and
    # would visit these objects again while requests run.
    gc.disable()
    try:
        from pagewise_executor.collectives import ALONE
        from pagewise_executor.model_runner import ModelRunner
        from pagewise_executor.tiers.peers import make_peers
    except ImportError as error:
        raise ModelError(
            f"the packages of the executor cannot be imported ({error}): install them again, with pip install "
            "--force-reinstall 'pagewise[executor]'"
        ) from error
    finally:
        gc.freeze()
        gc.enable()
    chosen = with_threads(config, lambda: choose_threads(began))
    if chosen is not config:
        log.info("using %d CPU threads (set --threads for another number)", chosen.threads)
    config, listener = chosen, None
    if leader is not None:
        spec, listener = leader.spec, leader.listener()
    ranks = _join(config, spec, listener) if spec is not None else ALONE
    folder = None if config.host_memory_dir == "none" else Path(config.host_memory_dir)
    exchange = partial(make_peers, config, keys, ranks.rank) if config.lend_blocks else None
    if leader is None:
        return ModelRunner(config, exchange=exchange, host_folder=folder, ranks=ranks)
    from pagewise_executor.leading_runner import LeadingRunner

    return LeadingRunner(leader, config, exchange=exchange, host_folder=folder, ranks=ranks)


def _join(config: ExecutorConfig, spec: "RankSpec", listener: int | None) -> "Ranks":
    """Select the GPU of this rank, if there are any, and join the process group of the ranks.

    ``listener``: the socket on which rank 0 answers ranks on other nodes.

    Raises:
        ModelError: there are fewer GPUs than ranks on this node.
    """
    import torch

    from pagewise_executor.collectives import Ranks
    from pagewise_executor.ranks.host import interface_of
    from pagewise_executor.tiers.block_endpoint import address_towards

    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda:
        needed = spec.size // config.nnodes
        if (count := torch.cuda.device_count()) < needed:
            raise ModelError(
                f"--tensor-parallel {spec.size}: this executor sees {count} GPUs here, and each of its {needed} ranks "
                "needs its own"
            )
        torch.cuda.set_device(spec.device)
    if not spec.store:
        return Ranks.join(spec.rank, spec.size, Path(spec.folder), cuda=cuda)
    interface = interface_of(address_towards(f"tcp://{spec.store}"))
    variable = "NCCL_SOCKET_IFNAME" if cuda else "GLOO_SOCKET_IFNAME"
    named = os.environ.get(variable)
    used = f"{named}, which {variable} names" if named else interface or "of this host's name"
    log.info("meeting the other ranks at %s, through the interface %s", spec.store, used)
    return Ranks.join(
        spec.rank, spec.size, spec.store, cuda=cuda, listener=listener, on_host=spec.on_host, interface=interface
    )


if __name__ == "__main__":
    sys.exit(main())
