"""The options of every command: names, types, defaults, and what the help says of them."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

DEMO_MODEL = "pagewise-demo"
"""Name of the bundled model."""

Device = Literal["auto", "cpu", "cuda"]
"""Where a model runs."""

GROUPS = {
    "model": (
        "revision",
        "served_model_name",
        "max_model_len",
        "device",
        "dtype",
        "kernels",
        "deterministic",
        "trust_remote_code",
        "simulate",
        "simulate_step",
    ),
    "batching": ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_waiting_tokens", "routing"),
    "KV cache": (
        "block_size",
        "num_blocks",
        "kv_memory",
        "kv_dtype",
        "kv_layout",
        "host_memory",
        "host_memory_dir",
        "keep_host_memory",
        "host_bandwidth",
        "verify_copies",
        "lend_blocks",
        "block_listen",
        "advertise",
        "recovery",
        "eviction",
    ),
    "HTTP": (
        "host",
        "port",
        "reuse_port",
        "ssl_certfile",
        "ssl_keyfile",
        "max_connections",
        "keepalive_timeout",
        "write_timeout",
        "max_body_bytes",
        "max_n",
    ),
    "API keys": (
        "api_keys_file",
        "public_metrics",
        "key_concurrent",
        "key_requests_per_minute",
        "key_tokens_per_minute",
    ),
    "processes": (
        "gateways",
        "executors",
        "profile",
        "cuda_graphs",
        "threads",
        "listen",
        "listen_gateways",
        "scheduler",
        "scheduler_timeout",
        "executor_id",
        "gateway_id",
        "gateway_timeout",
        "shutdown_timeout",
        "drain_timeout",
        "executor_timeout",
        "step_timeout",
        "log_level",
    ),
    "security": ("keys", "key_name", "plaintext"),
}
"""What belongs together in the help."""


def _help(text: str, metavar: str | None = None, more: str = "") -> Meta:
    """What the help says of an option. ``more``: what only the documents add to it."""
    return Meta(description=text, extra={"metavar": metavar, "more": more})


def without(*names: str) -> Meta:
    """Marks a part of a composed configuration: these options of it are none of the whole, which sets them itself."""
    return Meta(extra={"without": names})


Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]

# What several commands have. The same option has the same name, meaning and default in all of them.
Model = Annotated[str, _help("model directory or hub id", "MODEL")]
Revision = Annotated[str | None, _help("hub revision of the model", "REV")]
ServedModelName = Annotated[str | None, _help("name clients use for the model (default: MODEL)", "NAME")]
MaxNumSeqs = Annotated[Positive, _help("most sequences that run at once, per executor", "N")]
MaxNumBatchedTokens = Annotated[Positive, _help("token budget of one step: decodes first, then prefill chunks", "N")]
MaxModelLen = Annotated[
    Positive | None,
    _help("most tokens a sequence may reach, prompt and output (default: the model's own limit)", "N"),
]
Gateways = Annotated[Positive, _help("gateway processes to start, all on one port", "N")]
KeysFolder = Annotated[
    str | None, _help("folder of keys that encrypt and authenticate connections (see pagewise keys)", "DIR")
]
Plaintext = Annotated[bool, _help("let other hosts connect without keys, unencrypted")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], _help("least severity that is logged")]


SHARED_MEMORY = "/dev/shm"  # noqa: S108  # nosec B108 # what is put there is locked, its user's alone, and checked


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-scheduler``. It loads no model: ``model`` and ``served_model_name`` label its metrics."""

    model: Model = DEMO_MODEL
    served_model_name: ServedModelName = None
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    max_model_len: MaxModelLen = None
    max_waiting: Annotated[Positive, _help("most sequences that wait; more are answered 429", "N")] = 4096
    max_waiting_tokens: Annotated[
        Positive,
        _help(
            "most prompt tokens of requests that wait; more are answered 429", "N", "A longer request may wait alone."
        ),
    ] = 8_388_608
    routing: Annotated[
        Literal["ttft", "prefix", "least-loaded", "round-robin"],
        _help(
            "which executor a request goes to; ttft: where its first token is predicted to cost the least",
            more="That counts the queue, the recovery of its KV, and what it pushes out. `prefix`: the executor that "
            "holds the most of it.",
        ),
    ] = "ttft"
    recovery: Annotated[
        Literal["auto", "swap", "recompute", "both"],
        _help(
            "how KV comes back that lies on the host or at another executor; auto: the way that is predicted to be the "
            "fastest; swap: loaded; recompute: never loaded; both: loaded and computed at once"
        ),
    ] = "auto"
    eviction: Annotated[
        Literal["lru", "cost"],
        _help("what goes first when room is needed; cost: the least likely to be used again, weighed by its way back"),
    ] = "cost"
    listen: Annotated[str, _help("ZeroMQ endpoint executors connect to (tcp:// or ipc://)", "ENDPOINT")] = (
        "tcp://127.0.0.1:5757"
    )
    listen_gateways: Annotated[str, _help("ZeroMQ endpoint gateways connect to (tcp:// or ipc://)", "ENDPOINT")] = (
        "tcp://127.0.0.1:5758"
    )
    executor_timeout: Annotated[
        Seconds, _help("seconds without a heartbeat after which an executor is given up", "S")
    ] = 10.0
    gateway_timeout: Annotated[Seconds, _help("seconds without a heartbeat after which a gateway is given up", "S")] = (
        10.0
    )
    step_timeout: Annotated[Seconds, _help("seconds a step may take before its executor is given up", "S")] = 120.0
    keys: KeysFolder = None
    plaintext: Plaintext = False
    log_level: LogLevel = "info"


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-gateway``."""

    model: Model = DEMO_MODEL
    revision: Revision = None
    served_model_name: ServedModelName = None
    host: Annotated[str, _help("address the HTTP server listens on", "HOST")] = "127.0.0.1"
    port: Annotated[Port, _help("port the HTTP server listens on; 0 takes a free one", "PORT")] = 8000
    reuse_port: Annotated[bool, _help("let several gateways on this host listen on the same port")] = False
    ssl_certfile: Annotated[
        str | None, _help("certificate chain (PEM) for HTTPS; read again when it changes", "FILE")
    ] = None
    ssl_keyfile: Annotated[str | None, _help("private key (PEM) of --ssl-certfile", "FILE")] = None
    max_connections: Annotated[Positive, _help("most HTTP connections; further ones are answered 503", "N")] = 16_384
    keepalive_timeout: Annotated[
        Seconds, _help("seconds a connection may be without a request, or take to send the head of one", "S")
    ] = 75.0
    write_timeout: Annotated[Seconds, _help("seconds a client may stop reading before it is cut off", "S")] = 30.0
    api_keys: Annotated[
        str | None,
        Meta(
            description="API keys, NAME: KEY with commas between them, or a single key",
            extra={"environment_only": True},
        ),
    ] = None
    api_keys_file: Annotated[
        str | None, _help("file of API keys, a line NAME: KEY each; read again when it changes", "FILE")
    ] = None
    public_metrics: Annotated[bool, _help("answer /metrics without an API key too")] = False
    key_concurrent: Annotated[Positive | None, _help("most requests at once per API key (default: no limit)", "N")] = (
        None
    )
    key_requests_per_minute: Annotated[
        Positive | None, _help("most requests per minute and API key (default: no limit)", "N")
    ] = None
    key_tokens_per_minute: Annotated[
        Positive | None, _help("most tokens per minute and API key, prompts and outputs (default: no limit)", "N")
    ] = None
    max_body_bytes: Annotated[Positive, _help("largest HTTP request body", "N")] = 16 * 1024 * 1024
    max_n: Annotated[Positive, _help("most outputs (n) of one request", "N")] = 128
    scheduler: Annotated[str, _help("the scheduler's ZeroMQ endpoint for gateways", "ENDPOINT")] = (
        "tcp://127.0.0.1:5758"
    )
    scheduler_timeout: Annotated[Seconds, _help("seconds requests may wait while no scheduler answers", "S")] = 60.0
    gateway_id: Annotated[str | None, _help("name of this gateway (default: host name and process id)", "ID")] = None
    shutdown_timeout: Annotated[Seconds, _help("seconds that streams may go on after SIGTERM", "S")] = 5.0
    keys: KeysFolder = None
    key_name: Annotated[str, _help("name of this gateway's key in the folder of keys", "NAME")] = "gateway"
    plaintext: Plaintext = False
    log_level: LogLevel = "info"


class ExecutorConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-executor``."""

    model: Model = DEMO_MODEL
    revision: Revision = None
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    max_model_len: MaxModelLen = None
    device: Annotated[Device, _help("where the model runs; auto: the GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _help("of weights and KV; auto: the model's own on CUDA, float32 on the CPU"),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "triton", "torch"],
        _help(
            "who computes attention and the small operations; auto: Triton on CUDA, PyTorch on the CPU",
            more="On the CPU `triton` needs `TRITON_INTERPRET=1`: slow, for trying the kernels.",
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        _help(
            "the same tokens to the last bit whatever else runs, slower; Triton kernels and some families only",
            more="Whatever the batch, the chunking, preemptions and prefix hits. The families are Llama, Mistral, "
            "Qwen2 and Qwen3.",
        ),
    ] = False
    cuda_graphs: Annotated[
        bool,
        _help(
            "record decode steps as CUDA graphs when the executor starts",
            more="Some seconds and some memory for much less time between kernels. Triton kernels only, and no model "
            "that waits for the device inside a step (the log says so).",
        ),
    ] = True
    block_size: Annotated[Positive, _help("tokens per KV block", "N")] = 16
    num_blocks: Annotated[Positive | None, _help("blocks in the KV pool (default: from --kv-memory)", "N")] = None
    kv_memory: Annotated[
        str | None,
        _help(
            "size of the KV pool, such as 4GiB (default: from the memory that is free)",
            "SIZE",
            "Not with `--num-blocks`.",
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        _help(
            "of the KV pool; auto: as --dtype, fp8: half of it, scaled by token and head",
            more="fp8 is float8 (e4m3), at some loss; it needs Triton kernels and compute capability 8.9.",
        ),
    ] = "auto"
    kv_layout: Annotated[
        Literal["layers", "blocks"],
        _help(
            "whether the KV of a layer or that of a block lies together in the pool",
            more="Copies of blocks are longer with `blocks`; Triton kernels only.",
        ),
    ] = "layers"
    host_memory: Annotated[
        str | None, _help("host memory for KV that the device has no room for, such as 16GiB (default: none)", "SIZE")
    ] = None
    host_memory_dir: Annotated[
        str, _help("memory file system where host blocks outlive an executor that dies; none: they do not", "DIR")
    ] = SHARED_MEMORY
    keep_host_memory: Annotated[
        bool, _help("leave host blocks to the next executor also when this one ends in order")
    ] = False
    host_bandwidth: Annotated[
        str | None, _help("hold copies to and from the host to SIZE bytes per second each way, for experiments", "SIZE")
    ] = None
    verify_copies: Annotated[bool, _help("keep checksums of blocks on the host and check what comes back")] = False
    profile: Annotated[
        bool,
        _help(
            "measure what steps and copies cost before joining, about a second",
            more="`--no-profile` starts from guesses.",
        ),
    ] = True
    threads: Annotated[
        Positive | None,
        _help(
            "CPU threads of an executor (default: the cores it may use)",
            "N",
            "`pagewise serve` shares the cores out among its executors.",
        ),
    ] = None
    trust_remote_code: Annotated[bool, _help("run Python code that comes with the model")] = False
    simulate: Annotated[bool, _help("invent tokens instead of running a model: for tests and benchmarks")] = False
    simulate_step: Annotated[float, Meta(ge=0), _help("seconds that a step takes with --simulate", "S")] = 0.0
    lend_blocks: Annotated[bool, _help("let other executors fetch blocks from this one, and fetch from them")] = True
    drain_timeout: Annotated[
        Seconds, _help("seconds that moving work and cache to others may take after SIGTERM", "S")
    ] = 30.0
    block_listen: Annotated[
        str | None,
        _help(
            "ZeroMQ endpoint where others fetch blocks (default: a free port of the address that leads to --scheduler)"
        ),
    ] = None
    advertise: Annotated[
        str | None, _help("host name others find this executor under (default: its address towards --scheduler)")
    ] = None
    scheduler: Annotated[str, _help("the scheduler's ZeroMQ endpoint for executors", "ENDPOINT")] = (
        "tcp://127.0.0.1:5757"
    )
    executor_id: Annotated[str | None, _help("name of this executor (default: host name and process id)", "ID")] = None
    keys: KeysFolder = None
    key_name: Annotated[str, _help("name of this executor's key in the folder of keys", "NAME")] = "executor"
    plaintext: Plaintext = False
    log_level: LogLevel = "info"


class GatewaysConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise gateways``: those of each gateway, and how many to start."""

    gateway: Annotated[GatewayConfig, without("gateway_id", "reuse_port")] = GatewayConfig()
    gateways: Gateways = 1


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise serve``: those of the services it starts, and how many of them to start."""

    scheduler: Annotated[SchedulerConfig, without("listen", "listen_gateways")] = SchedulerConfig()
    gateway: Annotated[GatewayConfig, without("scheduler", "gateway_id", "key_name", "reuse_port")] = GatewayConfig()
    executor: Annotated[ExecutorConfig, without("scheduler", "executor_id", "key_name")] = ExecutorConfig()
    gateways: Gateways = 1
    executors: Annotated[int, Meta(ge=0), _help("executor processes to start", "N")] = 1
    listen: Annotated[
        str | None, _help("ZeroMQ endpoint executors connect to (default: a private ipc socket)", "ENDPOINT")
    ] = None
    listen_gateways: Annotated[
        str | None, _help("ZeroMQ endpoint gateways connect to (default: a private ipc socket)", "ENDPOINT")
    ] = None
