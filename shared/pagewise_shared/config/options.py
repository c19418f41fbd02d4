"""The options of every command: names, types, defaults, and what the help says of them."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

DEMO_MODEL = "pagewise-demo"
"""Name of the bundled model."""

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


def _help(text: str, metavar: str | None = None) -> Meta:
    return Meta(description=text, extra={"metavar": metavar} if metavar else None)


Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Device = Annotated[Literal["auto", "cpu", "cuda"], _help("where the model runs; auto: the GPU if there is one")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _help("of weights and KV; auto: the model's own on CUDA, float32 on the CPU"),
]
Kernels = Annotated[
    Literal["auto", "triton", "torch"],
    _help("who computes attention and the small operations; auto: Triton on CUDA, PyTorch on the CPU"),
]
KVDtype = Annotated[
    Literal["auto", "fp8"], _help("of the KV pool; auto: as --dtype, fp8: half of it, scaled by token and head")
]
KVLayout = Annotated[
    Literal["layers", "blocks"], _help("whether the KV of a layer or that of a block lies together in the pool")
]
BlockSize = Annotated[Positive, _help("tokens per KV block", "N")]
NumBlocks = Annotated[Positive | None, _help("blocks in the KV pool (default: from --kv-memory)", "N")]
KVMemory = Annotated[
    str | None, _help("size of the KV pool, such as 4GiB (default: from the memory that is free)", "SIZE")
]
HostMemory = Annotated[
    str | None, _help("host memory for KV that the device has no room for, such as 16GiB (default: none)", "SIZE")
]
HostMemoryDir = Annotated[
    str, _help("memory file system where host blocks outlive an executor that dies; none: they do not", "DIR")
]
KeepHostMemory = Annotated[bool, _help("leave host blocks to the next executor also when this one ends in order")]
HostBandwidth = Annotated[
    str | None, _help("hold copies to and from the host to SIZE bytes per second each way, for experiments", "SIZE")
]
VerifyCopies = Annotated[bool, _help("keep checksums of blocks on the host and check what comes back")]
LendBlocks = Annotated[bool, _help("let other executors fetch blocks from this one, and fetch from them")]
Profile = Annotated[bool, _help("measure what steps and copies cost before joining, about a second")]
Recovery = Annotated[
    Literal["auto", "swap", "recompute", "both"],
    _help(
        "how KV comes back that lies on the host or at another executor; auto: the way that is predicted to be the "
        "fastest; swap: loaded; recompute: never loaded; both: loaded and computed at once"
    ),
]
Eviction = Annotated[
    Literal["lru", "cost"],
    _help("what goes first when room is needed; cost: the least likely to be used again, weighed by its way back"),
]
Routing = Annotated[
    Literal["ttft", "prefix", "least-loaded", "round-robin"],
    _help("which executor a request goes to; ttft: where its first token is predicted to cost the least"),
]
Deterministic = Annotated[
    bool, _help("the same tokens to the last bit whatever else runs, slower; Triton kernels and some families only")
]
CudaGraphs = Annotated[bool, _help("record decode steps as CUDA graphs when the executor starts")]
Threads = Annotated[Positive | None, _help("CPU threads of an executor (default: the cores it may use)", "N")]
TrustRemoteCode = Annotated[bool, _help("run Python code that comes with the model")]
KeysFolder = Annotated[
    str | None, _help("folder of keys that encrypt and authenticate executors' connections (see pagewise keys)", "DIR")
]
Plaintext = Annotated[bool, _help("let executors connect from other hosts without keys, unencrypted")]
Simulate = Annotated[bool, _help("invent tokens instead of running a model: for tests and benchmarks")]
SimulateStep = Annotated[float, Meta(ge=0), _help("seconds that a step takes with --simulate", "S")]


SHARED_MEMORY = "/dev/shm"  # noqa: S108  # nosec B108 # what is put there is locked, its user's alone, and checked


class ModelOptions(Struct, frozen=True, kw_only=True):
    """Options that every command has."""

    model: Annotated[str, _help("model directory or hub id", "MODEL")] = DEMO_MODEL
    revision: Annotated[str | None, _help("hub revision of the model", "REV")] = None
    max_num_seqs: Annotated[Positive, _help("most sequences that run at once, per executor", "N")] = 256
    max_num_batched_tokens: Annotated[
        Positive, _help("token budget of one step: decodes first, then prefill chunks", "N")
    ] = 2048
    max_model_len: Annotated[
        Positive | None, _help("most tokens a sequence may reach (default: the model's own limit)", "N")
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _help("least severity that is logged")] = "info"


class HTTPOptions(ModelOptions, frozen=True, kw_only=True):
    """Options of whoever faces the clients."""

    served_model_name: Annotated[str | None, _help("name clients use for the model (default: MODEL)", "NAME")] = None
    host: Annotated[str, _help("address the HTTP server listens on", "HOST")] = "127.0.0.1"
    port: Annotated[Port, _help("port the HTTP server listens on; 0 takes a free one", "PORT")] = 8000
    max_waiting: Annotated[Positive, _help("most sequences that wait; more are answered 429", "N")] = 4096
    max_waiting_tokens: Annotated[
        Positive, _help("most prompt tokens of requests that wait; more are answered 429", "N")
    ] = 8_388_608
    max_connections: Annotated[Positive, _help("most HTTP connections; further ones are answered 503", "N")] = 16_384
    keepalive_timeout: Annotated[
        Seconds, _help("seconds a connection may be without a request, or take to send the head of one", "S")
    ] = 75.0
    write_timeout: Annotated[Seconds, _help("seconds a client may stop reading before it is cut off", "S")] = 30.0
    api_keys: Annotated[str | None, Meta(extra={"secret": True})] = None  # nosec B105 # it says that there is one
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
    executor_timeout: Annotated[
        Seconds, _help("seconds without a heartbeat after which an executor is given up", "S")
    ] = 10.0
    step_timeout: Annotated[Seconds, _help("seconds a step may take before its executor is given up", "S")] = 120.0
    recovery: Recovery = "auto"
    eviction: Eviction = "cost"
    routing: Routing = "ttft"


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-scheduler``. ``model`` and ``served_model_name`` only label its metrics."""

    model: Annotated[str, _help("model directory or hub id", "MODEL")] = DEMO_MODEL
    served_model_name: Annotated[str | None, _help("name clients use for the model (default: MODEL)", "NAME")] = None
    max_num_seqs: Annotated[Positive, _help("most sequences that run at once, per executor", "N")] = 256
    max_num_batched_tokens: Annotated[
        Positive, _help("token budget of one step: decodes first, then prefill chunks", "N")
    ] = 2048
    max_model_len: Annotated[
        Positive | None, _help("most tokens a sequence may reach (default: the model's own limit)", "N")
    ] = None
    max_waiting: Annotated[Positive, _help("most sequences that wait; more are answered 429", "N")] = 4096
    max_waiting_tokens: Annotated[
        Positive, _help("most prompt tokens of requests that wait; more are answered 429", "N")
    ] = 8_388_608
    routing: Routing = "ttft"
    recovery: Recovery = "auto"
    eviction: Eviction = "cost"
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
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _help("least severity that is logged")] = "info"


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-gateway``."""

    model: Annotated[str, _help("model directory or hub id", "MODEL")] = DEMO_MODEL
    revision: Annotated[str | None, _help("hub revision of the model", "REV")] = None
    served_model_name: Annotated[str | None, _help("name clients use for the model (default: MODEL)", "NAME")] = None
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
    api_keys: Annotated[str | None, Meta(extra={"secret": True})] = None  # nosec B105 # it says that there is one
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
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _help("least severity that is logged")] = "info"


class ExecutorConfig(ModelOptions, frozen=True, kw_only=True):
    """Options of ``pagewise-executor``."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    kernels: Kernels = "auto"
    deterministic: Deterministic = False
    cuda_graphs: CudaGraphs = True
    block_size: BlockSize = 16
    num_blocks: NumBlocks = None
    kv_memory: KVMemory = None
    kv_dtype: KVDtype = "auto"
    kv_layout: KVLayout = "layers"
    host_memory: HostMemory = None
    host_memory_dir: HostMemoryDir = SHARED_MEMORY
    keep_host_memory: KeepHostMemory = False
    host_bandwidth: HostBandwidth = None
    verify_copies: VerifyCopies = False
    profile: Profile = True
    threads: Threads = None
    trust_remote_code: TrustRemoteCode = False
    simulate: Simulate = False
    lend_blocks: LendBlocks = True
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
    simulate_step: SimulateStep = 0.0
    scheduler: Annotated[str, _help("the scheduler's ZeroMQ endpoint", "ENDPOINT")] = "tcp://127.0.0.1:5757"
    executor_id: Annotated[str | None, _help("name of this executor (default: host name and process id)", "ID")] = None
    keys: KeysFolder = None
    key_name: Annotated[str, _help("name of this executor's key in the folder of keys", "NAME")] = "executor"
    plaintext: Plaintext = False


class ServeConfig(HTTPOptions, frozen=True, kw_only=True):
    """Options of ``pagewise serve``: those of both services, and how many executors to start."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    kernels: Kernels = "auto"
    deterministic: Deterministic = False
    cuda_graphs: CudaGraphs = True
    block_size: BlockSize = 16
    num_blocks: NumBlocks = None
    kv_memory: KVMemory = None
    kv_dtype: KVDtype = "auto"
    kv_layout: KVLayout = "layers"
    host_memory: HostMemory = None
    host_memory_dir: HostMemoryDir = SHARED_MEMORY
    keep_host_memory: KeepHostMemory = False
    host_bandwidth: HostBandwidth = None
    verify_copies: VerifyCopies = False
    profile: Profile = True
    threads: Threads = None
    trust_remote_code: TrustRemoteCode = False
    simulate: Simulate = False
    lend_blocks: LendBlocks = True
    simulate_step: SimulateStep = 0.0
    executors: Annotated[int, Meta(ge=0), _help("executor processes to start", "N")] = 1
    listen: Annotated[
        str | None, _help("ZeroMQ endpoint for executors (default: a private ipc socket)", "ENDPOINT")
    ] = None
    keys: KeysFolder = None
    plaintext: Plaintext = False
