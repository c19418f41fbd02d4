"""Configuration: the one place that reads options and ``PAGEWISE_*`` environment variables.

A configuration is a frozen struct whose fields are the options: ``max_num_seqs`` is ``--max-num-seqs`` on the
command line and ``PAGEWISE_MAX_NUM_SEQS`` in the environment, in that order of precedence. The same option has
the same name, meaning and default in every command.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from pagewise_shared.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=Struct)

DEMO_MODEL = "pagewise-demo"
"""Name of the bundled model; ``resolve_model_path`` turns it into its directory."""

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]


def _help(text: str, metavar: str | None = None) -> Meta:
    return Meta(description=text, extra={"metavar": metavar} if metavar else None)


Model = Annotated[str, _help("model directory or hub id", "MODEL")]
ServedModelName = Annotated[str | None, _help("name clients use for the model (default: MODEL)", "NAME")]
Revision = Annotated[str | None, _help("hub revision of the model", "REV")]
MaxModelLen = Annotated[Positive | None, _help("most tokens a sequence may reach (default: the model's own limit)", "N")]
MaxNumSeqs = Annotated[Positive, _help("most sequences that run at once, per executor", "N")]
MaxNumBatchedTokens = Annotated[Positive, _help("token budget of one step: decodes first, then prefill chunks", "N")]
Device = Annotated[Literal["auto", "cpu", "cuda"], _help("where the model runs; auto: the GPU if there is one")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _help("of weights and KV; auto: the model's own on CUDA, float32 on the CPU"),
]
BlockSize = Annotated[Positive, _help("tokens per KV block", "N")]
NumBlocks = Annotated[Positive | None, _help("blocks in the KV pool (default: from --kv-memory)", "N")]
KVMemory = Annotated[
    str | None, _help("size of the KV pool, such as 4GiB (default: from the memory that is free)", "SIZE")
]
Host = Annotated[str, _help("address the HTTP server listens on", "HOST")]
HTTPPort = Annotated[Port, _help("port the HTTP server listens on; 0 takes a free one", "PORT")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], _help("least severity that is logged")]
TrustRemoteCode = Annotated[bool, _help("run Python code that comes with the model")]


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-scheduler``."""

    model: Model = DEMO_MODEL
    served_model_name: ServedModelName = None
    revision: Revision = None
    host: Host = "127.0.0.1"
    port: HTTPPort = 8000
    listen: Annotated[str, _help("ZeroMQ endpoint executors connect to (tcp:// or ipc://)", "ENDPOINT")] = (
        "tcp://127.0.0.1:5757"
    )
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    max_model_len: MaxModelLen = None
    max_waiting: Annotated[Positive, _help("most requests that wait; more are answered 429", "N")] = 4096
    max_body_bytes: Annotated[Positive, _help("largest HTTP request body", "N")] = 16 * 1024 * 1024
    max_n: Annotated[Positive, _help("most outputs (n) of one request", "N")] = 128
    executor_timeout: Annotated[
        float, Meta(gt=0), _help("seconds without a heartbeat after which an executor is given up", "S")
    ] = 10.0
    log_level: LogLevel = "info"


class ExecutorConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-executor``."""

    model: Model = DEMO_MODEL
    revision: Revision = None
    scheduler: Annotated[str, _help("the scheduler's ZeroMQ endpoint", "ENDPOINT")] = "tcp://127.0.0.1:5757"
    executor_id: Annotated[str | None, _help("name of this executor (default: host name and a random part)", "ID")] = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    block_size: BlockSize = 16
    num_blocks: NumBlocks = None
    kv_memory: KVMemory = None
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    max_model_len: MaxModelLen = None
    threads: Annotated[Positive | None, _help("CPU threads (default: the physical cores this process may use)", "N")] = None
    trust_remote_code: TrustRemoteCode = False
    simulate: Annotated[bool, _help("invent tokens instead of running a model: for tests and benchmarks")] = False
    log_level: LogLevel = "info"


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise serve``: those of both services, and how many executors to start."""

    model: Model = DEMO_MODEL
    served_model_name: ServedModelName = None
    revision: Revision = None
    host: Host = "127.0.0.1"
    port: HTTPPort = 8000
    executors: Annotated[int, Meta(ge=0), _help("executor processes to start", "N")] = 1
    device: Device = "auto"
    dtype: Dtype = "auto"
    block_size: BlockSize = 16
    num_blocks: NumBlocks = None
    kv_memory: KVMemory = None
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    max_model_len: MaxModelLen = None
    threads: Annotated[Positive | None, _help("CPU threads per executor (default: the cores, shared out)", "N")] = None
    listen: Annotated[
        str | None, _help("ZeroMQ endpoint for executors (default: an ipc socket of this run)", "ENDPOINT")
    ] = None
    max_waiting: Annotated[Positive, _help("most requests that wait; more are answered 429", "N")] = 4096
    max_body_bytes: Annotated[Positive, _help("largest HTTP request body", "N")] = 16 * 1024 * 1024
    max_n: Annotated[Positive, _help("most outputs (n) of one request", "N")] = 128
    executor_timeout: Annotated[
        float, Meta(gt=0), _help("seconds without a heartbeat after which an executor is given up", "S")
    ] = 10.0
    trust_remote_code: TrustRemoteCode = False
    simulate: Annotated[bool, _help("invent tokens instead of running a model: for tests and benchmarks")] = False
    log_level: LogLevel = "info"
