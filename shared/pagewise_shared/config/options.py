"""The options of every command: names, types, defaults and help texts."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pagewise_shared.config import adapter_options
from pagewise_shared.config.kinds import Port, Positive, Seconds
from pagewise_shared.config.kinds import described as _help
from pagewise_shared.config.kv_events import KVEventsOption
from pagewise_shared.config.speculative import SpeculativeOption
from pagewise_shared.protocol import Role
from pagewise_shared.protocol.limits import MAX_BATCHED_TOKENS, MAX_RANKS

DEMO_MODEL = "pagewise-demo"
"""Name of the bundled model."""

EvictionName = Literal["lru", "cost"]
"""A policy of eviction. The scheduler has a class for each name."""

Device = Literal["auto", "cpu", "cuda"]
"""Where a model runs."""

# Options of several commands. The same option has the same name, meaning and default in all of them.
Model = Annotated[str, _help("model directory, GGUF file, or hub id", "MODEL")]
Revision = Annotated[str | None, _help("hub revision of the model", "REV")]
ServedModelName = Annotated[str | None, _help("name clients use for the model (default: MODEL)", "NAME")]
Gateways = Annotated[Positive, _help("number of gateway processes to start, all on one port", "N")]
Executors = Annotated[int, Meta(ge=0), _help("number of executor processes to start", "N")]
KeysFolder = Annotated[
    str | None, _help("folder of keys that encrypt and authenticate connections (see pagewise keys)", "DIR")
]
Plaintext = Annotated[bool, _help("allow connections with other hosts without keys, unencrypted")]
ConsoleShowsText = Annotated[
    bool,
    _help(
        "let the console show operators the text of cached blocks, which is that of clients' prompts",
        more="The gateway and the scheduler both need it: without it, the scheduler sends no gateway the tokens of "
        "cached blocks.",
    ),
]
ToolCallParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "gemma4",
    "glm45",
    "glm47",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "openai",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "gemma4",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "nemotron_v3",
    "openai_gptoss",
    "qwen3",
]
DEFAULT_NUM_SEQS, DEFAULT_BATCHED_TOKENS = 256, 2048
"""The limits of a step that neither an option nor an executor's device sets."""

_BY_DEVICE = "1,024 and 8,192 on GPUs with 70 GiB and compute capability 9.0 or more, as in vLLM"

MaxNumSeqs = Annotated[
    Positive | None,
    _help(
        f"maximum number of sequences that run at the same time, per executor (default: {DEFAULT_NUM_SEQS}, or by the "
        "GPU)",
        "N",
        f"Each executor chooses its own by its device, with the token budget: {_BY_DEVICE}. Each sequence needs a "
        "token of the budget: more are refused, or raise a budget that is not given.",
    ),
]
MaxNumBatchedTokens = Annotated[
    Annotated[int, Meta(ge=1, le=MAX_BATCHED_TOKENS)] | None,
    _help(
        f"token budget of one step: decodes first, then prefill chunks (default: {DEFAULT_BATCHED_TOKENS}, or by the "
        "GPU)",
        "N",
        "See `--max-num-seqs`.",
    ),
]
MaxModelLen = Annotated[
    Positive | Literal["auto"] | None,
    _help(
        "maximum tokens of a sequence, prompt and output; auto: as many as fit into the KV pool (default: the model's "
        "own limit)",
        "N",
        "`auto` is never more than the model's own limit either.",
    ),
]

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], _help("lowest severity that is logged")]
LogFormat = Annotated[
    Literal["text", "json"],
    _help(
        "how a line of the log is written; json: as an object, for programs that collect logs",
        more="[observability.md](observability.md#logs) lists the fields.",
    ),
]

TracesEndpoint = Annotated[
    str | None,
    _help(
        "OpenTelemetry collector to which traces of requests are sent, such as http://collector:4318 (default: none)",
        "URL",
        "OTLP over HTTP; a URL without a path gets `/v1/traces`. It needs `pip install pagewise[otel]`. "
        "[observability.md](observability.md#traces) describes the content of a trace.",
    ),
]

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # nosec B108 # its files are locked, checked, and their user's alone


MAX_BODY_BYTES, MAX_BODY_MEMORY = 4 * 2**20, 64 * 2**20
"""The defaults of ``--max-body-bytes`` and ``--max-body-memory``."""


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-scheduler``. It loads no model: ``model`` and ``served_model_name`` label its metrics."""

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: TracesEndpoint = None
    console_shows_text: ConsoleShowsText = False
    gateways_end_any_request: Annotated[
        bool,
        _help(
            "let each gateway's operators end requests of all gateways",
            more="Without it, a gateway ends its own requests only. `pagewise serve` and `pagewise up` set it, because "
            "they start all gateways, unless others may join (`--listen-gateways`).",
        ),
    ] = False
    lora_modules: adapter_options.LoraModules = ()
    allow_runtime_lora_updating: adapter_options.AllowRuntimeLoraUpdating = False
    model: Model = DEMO_MODEL
    served_model_name: ServedModelName = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    max_model_len: MaxModelLen = None
    max_waiting: Annotated[
        Positive, _help("maximum number of waiting sequences; further requests are answered with 429", "N")
    ] = 4096
    max_waiting_tokens: Annotated[
        Positive,
        _help(
            "maximum prompt tokens of waiting requests; further requests are answered with 429",
            "N",
            "A single request may exceed it, if no other waits.",
        ),
    ] = 8_388_608
    routing: Annotated[
        Literal["ttft", "prefix", "least-loaded", "round-robin"],
        _help(
            "how the executor of a request is chosen; ttft: by the lowest predicted cost of its first token",
            more="The cost counts the executor's queue, the recovery of the prompt's KV, and the blocks that would be "
            "evicted. `prefix`: the executor that has most of the prompt cached.",
        ),
    ] = "ttft"
    speculative_config: SpeculativeOption = None
    kv_events_config: KVEventsOption = None
    kv_cache_metrics: Annotated[
        bool, _help("measure lifetimes of blocks on the device, and gaps between their uses: histograms in /metrics")
    ] = False
    kv_cache_metrics_sample: Annotated[
        float,
        Meta(gt=0, le=1),
        _help("share of the blocks that --kv-cache-metrics measures, chosen by chance", "SHARE"),
    ] = 0.01
    recovery: Annotated[
        Literal["auto", "swap", "recompute", "both"],
        _help(
            "how KV is recovered that lies below the device or at another executor; auto: by the method with the "
            "shortest predicted time; swap: load it; recompute: compute it again; both: load and compute at the same "
            "time"
        ),
    ] = "auto"
    storage_salted: Annotated[
        bool,
        _help(
            "let KV of requests with a cache salt go to disk caches and stores",
            more="Requests with API keys have one, unless keys share their cache. Storage has it only as part of "
            "hashes.",
        ),
    ] = True
    eviction: Annotated[
        EvictionName,
        _help(
            "which cached blocks are evicted first; cost: the blocks that are cheapest to lose, predicted from "
            "similar blocks"
        ),
    ] = "cost"
    listen: Annotated[str, _help("ZeroMQ endpoint that executors connect to (tcp:// or ipc://)", "ENDPOINT")] = (
        "tcp://127.0.0.1:5757"
    )
    listen_gateways: Annotated[
        str, _help("ZeroMQ endpoint that gateways connect to (tcp:// or ipc://)", "ENDPOINT")
    ] = "tcp://127.0.0.1:5758"
    executor_timeout: Annotated[
        Seconds, _help("seconds without a heartbeat after which an executor is given up at the latest", "S")
    ] = 10.0
    gateway_timeout: Annotated[
        Seconds, _help("seconds without a heartbeat after which a gateway is given up at the latest", "S")
    ] = 10.0
    placement_timeout: Annotated[
        Seconds,
        _help(
            "seconds that a request may wait while no executor can take it",
            "S",
            "Let it be longer than an executor takes to start, so that no request fails while the only one starts.",
        ),
    ] = 60.0
    step_timeout: Annotated[Seconds, _help("seconds a step may take before its executor is given up", "S")] = 120.0
    service_status: Annotated[
        str | None,
        _help(
            "file in which the program that starts the services says which of them keep failing; /health shows it",
            "FILE",
            "`pagewise serve` and `pagewise up` write one by themselves.",
        ),
    ] = None
    keys: KeysFolder = None
    plaintext: Plaintext = False


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-gateway``."""

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: TracesEndpoint = None
    enable_lora: adapter_options.EnableLora = False
    max_lora_rank: adapter_options.MaxLoraRank = 16
    lora_modules: adapter_options.LoraModules = ()
    allow_runtime_lora_updating: adapter_options.AllowRuntimeLoraUpdating = False
    enable_auto_tool_choice: Annotated[
        bool,
        _help(
            "let the model decide whether it calls a tool",
            more="[tools.md](tools.md) describes tools and reasoning.",
        ),
    ] = True
    tool_call_parser: Annotated[
        ToolCallParser,
        _help(
            "format in which the model writes tool calls; auto: the format of its chat template or its family",
            more="The log and `/v1/models` name the format that was found.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        _help("format in which the model writes its reasoning; auto: the format of its chat template"),
    ] = "auto"
    reasoning_config: Annotated[
        str | None,
        _help(
            "text with which reasoning ends when a request's thinking budget is used up, as JSON: reasoning_end_str",
            "JSON",
            more="[tools.md](tools.md#thinking-budgets) describes thinking budgets.",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        _help("variables of the chat template that requests need not give, as JSON", "JSON"),
    ] = None
    generation_config: Annotated[
        str,
        _help(
            "source of the defaults of sampling parameters; auto: generation_config.json of the model; vllm: the API's "
            "defaults; or a folder with a generation_config.json",
            "SOURCE",
            "[operations.md](operations.md#defaults-of-sampling-parameters) names the parameters.",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str | None,
        _help('sampling parameters that override --generation-config, as JSON, such as {"temperature": 0.5}', "JSON"),
    ] = None
    enable_force_include_usage: Annotated[
        bool,
        _help(
            "send token counts with every event of streams of completions and chats, as if all requests asked for them"
        ),
    ] = False
    console: Annotated[
        bool,
        _help(
            "serve the console at /console, a page that shows memory, requests and processes",
            more="Its data is for operators, like the data of `/debug`. [console.md](console.md) describes the page.",
        ),
    ] = True
    console_shows_text: ConsoleShowsText = False
    model: Model = DEMO_MODEL
    revision: Revision = None
    served_model_name: ServedModelName = None
    host: Annotated[str, _help("address the HTTP server listens on", "HOST")] = "127.0.0.1"
    port: Annotated[Port, _help("port the HTTP server listens on; 0 takes a free one", "PORT")] = 8000
    reuse_port: Annotated[bool, _help("let several gateways on this host listen on the same port")] = False
    allowed_hosts: Annotated[
        str | None, _help("without API keys, names in Host that are answered besides localhost; * allows all", "NAMES")
    ] = None
    ssl_certfile: Annotated[
        str | None, _help("certificate chain (PEM) for HTTPS; read again when it changes", "FILE")
    ] = None
    ssl_keyfile: Annotated[str | None, _help("private key (PEM) of --ssl-certfile", "FILE")] = None
    max_connections: Annotated[
        Positive, _help("maximum number of HTTP connections; further ones are answered with 503", "N")
    ] = 16_384
    keepalive_timeout: Annotated[
        Seconds, _help("seconds a connection may be without a request, or take to send the head of one", "S")
    ] = 75.0
    write_timeout: Annotated[
        Seconds, _help("seconds after which a client that has stopped reading is disconnected", "S")
    ] = 30.0
    sse_keep_alive_interval: Annotated[
        float,
        Meta(ge=0, le=86_400),
        _help(
            "seconds without an event after which a stream gets a comment, so that no proxy ends it while a request "
            "waits or its prompt is computed; 0: no comments",
            "S",
            "Streams of `/v1/messages` get the event `ping` instead. [operations.md](operations.md#gateways) describes "
            "the details.",
        ),
    ] = 15.0
    api_keys: Annotated[
        str | None,
        Meta(
            description="API keys: entries NAME: KEY with commas between them, or a single key, an operator's",
            extra={"environment_only": True},
        ),
    ] = None
    api_keys_file: Annotated[
        str | None, _help("file of API keys, one line NAME: KEY each; read again when it changes", "FILE")
    ] = None
    share_cache: Annotated[
        bool,
        _help(
            "let all API keys share cached KV",
            more="Without it, only requests of keys with the same name or group do. Without API keys all requests do.",
        ),
    ] = False
    public_metrics: Annotated[bool, _help("answer /metrics without an API key too")] = False
    key_concurrent: Annotated[
        Positive | None, _help("maximum concurrent requests per API key (default: no limit)", "N")
    ] = None
    key_requests_per_minute: Annotated[
        Positive | None, _help("maximum requests per minute per API key (default: no limit)", "N")
    ] = None
    key_tokens_per_minute: Annotated[
        Positive | None, _help("maximum tokens per minute per API key, prompts and outputs (default: no limit)", "N")
    ] = None
    max_body_bytes: Annotated[
        Positive,
        _help(
            "maximum size of an HTTP request body, in bytes; 4 MiB hold a million tokens of English text",
            "N",
            "A list of token ids takes up to seven bytes for each: 600,000 of them fit.",
        ),
    ] = MAX_BODY_BYTES
    max_body_memory: Annotated[
        Positive,
        _help(
            "maximum bytes of bodies that a gateway reads, parses and tokenizes at the same time",
            "N",
            "Each API key may use a quarter of them (at least `--max-body-bytes`). Beyond that the answer is 429.",
        ),
    ] = MAX_BODY_MEMORY
    max_answer_memory: Annotated[
        Positive,
        _help(
            "maximum bytes of answers that a gateway collects and writes at the same time, as estimated",
            "N",
            "A token counts as 24 bytes, a log-probability as 64; streams count as far as they are not read, and the "
            "first 64 KiB of each request not at all. Each API key may use a quarter of them, and so may one request: "
            "one that may need more is refused with 400. Beyond that the answer is 429.",
        ),
    ] = 512 * 1024 * 1024
    max_n: Annotated[Positive, _help("maximum number of outputs (n) of one request", "N")] = 128
    scheduler: Annotated[str, _help("the scheduler's ZeroMQ endpoint for gateways, or file:PATH of it", "ENDPOINT")] = (
        "tcp://127.0.0.1:5758"
    )
    scheduler_timeout: Annotated[Seconds, _help("seconds that requests may wait while no scheduler answers", "S")] = (
        60.0
    )
    gateway_id: Annotated[str | None, _help("name of this gateway (default: host name and process id)", "ID")] = None
    shutdown_timeout: Annotated[Seconds, _help("seconds that running streams may continue after SIGTERM", "S")] = 5.0
    keys: KeysFolder = None
    key_name: Annotated[str, _help("name of this gateway's key in the folder of keys", "NAME")] = "gateway"
    plaintext: Plaintext = False
    log_requests: Annotated[
        bool, _help("log a line for each request when it ends: its id, key, tokens, times; nothing of its text")
    ] = False


class ExecutorConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise-executor``."""

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    enable_lora: adapter_options.EnableLora = False
    max_lora_rank: adapter_options.MaxLoraRank = 16
    max_loras: adapter_options.MaxLoras = 1
    max_cpu_loras: adapter_options.MaxCpuLoras = None
    model: Model = DEMO_MODEL
    revision: Revision = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    max_model_len: MaxModelLen = None
    speculative_config: SpeculativeOption = None
    tensor_parallel: Annotated[
        int,
        Meta(ge=1, le=MAX_RANKS, extra={"short": "--tensor-parallel-size"}),
        _help(
            "processes that hold a part of the model each and compute a step together, on a GPU each: an executor's "
            "ranks",
            "N",
            "`--tensor-parallel-size` is the same. `--kv-memory` is that of each rank, `--host-memory` that of all of "
            "them together ([operations.md](operations.md#a-model-larger-than-one-device)).",
        ),
    ] = 1
    nnodes: Annotated[
        Positive,
        _help(
            "nodes that the ranks of this executor are on; each of them runs pagewise-executor, with the same options",
            "N",
            "Each node has the same number of ranks ([operations.md](operations.md#ranks-on-several-hosts)).",
        ),
    ] = 1
    node_rank: Annotated[
        int, Meta(ge=0), _help("which of the --nnodes nodes this is; node 0 has rank 0, which the others join", "N")
    ] = 0
    master_addr: Annotated[
        str,
        _help(
            "name or address of node 0, by which the other nodes reach it; without brackets and port",
            "HOST",
            "A name may not resolve yet, such as that of a pod that is about to start: every node tries again for ten "
            "minutes, and says so in its log at once and every 30 s, with the number of attempts.",
        ),
    ] = "127.0.0.1"
    master_port: Annotated[
        Port,
        _help(
            "port of node 0 on which it waits for the other nodes; 0 takes a free one",
            "PORT",
            "NCCL and gloo take further ports, which they choose themselves.",
        ),
    ] = 29501
    device: Annotated[Device, _help("where the model runs; auto: the GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _help(
            "data type of weights and KV; auto: the model's own on CUDA, float32 on the CPU",
            more="On CPUs with instructions for it (AVX-512 BF16, AMX) bfloat16 takes half the memory, and less time "
            "for prompts ([performance.md](performance.md)); on others it is slower than float32: a warning says so.",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "triton", "cpu", "torch"],
        _help(
            "operations that compute the model; auto: Triton's kernels on CUDA, operations in C (cpu) on the CPU",
            more="[kernels.md](kernels.md) describes them. On the CPU `triton` needs `TRITON_INTERPRET=1`, which is "
            "slow and only meant for trying the kernels.",
        ),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "triton", "gluon", "fa3", "flashinfer"],
        _help("attention of prompts on a GPU; auto: the fastest of Triton, Gluon, FlashAttention 3 and FlashInfer"),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        _help(
            "quantise linear layers while they are loaded: int4, int8 on the CPU, fp8 on GPUs; none: as they are",
            more="A checkpoint that is quantised needs no option ([quantization.md](quantization.md)). Experts of "
            "mixtures are quantised by int4 on the CPU alone. Tokens change: "
            "[quantization.md](quantization.md#what-it-changes) says how much. Executors that serve a model together "
            "need the same value.",
        ),
    ] = "none"
    quantization_text: Annotated[
        str | None,
        _help(
            "text with which --quantization int4 rounds weights so that outputs change less (default: each by itself)",
            "FILE",
            "A few pages, of the kind that is served; up to 8,192 tokens are computed while the model is loaded "
            "([quantization.md](quantization.md#rounding-by-a-text)). Executors that serve a model together need the "
            "same text, and processors of one kind. Not with `--tensor-parallel`.",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        _help(
            "bitwise the same results whatever else runs; slower, for Triton kernels and some model families only",
            more="The results do not depend on the batch, chunked prefill, preemption and prefix hits. The families "
            "are Llama, Mistral, Qwen2 and Qwen3.",
        ),
    ] = False
    cuda_graphs: Annotated[
        bool,
        _help(
            "record steps of up to 512 decodes or 1,024 tokens as CUDA graphs when the executor starts",
            more="This takes some seconds and some memory, and leaves much less time between kernels. It needs Triton "
            "kernels and a model that does not wait for the device inside a step (the log says so).",
        ),
    ] = True
    dependent_launch: Annotated[
        bool,
        _help(
            "let a Triton kernel begin while the one before it ends, where the GPU can (compute capability 9.0)",
            more="Results are the same. It takes CUDA 12.3 ([kernels.md](kernels.md#programmatic-dependent-launch)).",
        ),
    ] = True
    block_size: Annotated[Positive, _help("tokens per KV block", "N")] = 16
    num_blocks: Annotated[Positive | None, _help("blocks in the KV pool (default: from --kv-memory)", "N")] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        _help(
            "share of a GPU's memory that an executor may take, for weights, steps and the KV pool",
            "SHARE",
            "Not with `--num-blocks` or `--kv-memory`. Without effect on the CPU, as a warning says.",
        ),
    ] = 0.9
    kv_memory: Annotated[
        str | None,
        _help(
            "size of the KV pool, such as 4GiB (default: by --gpu-memory-utilization; on the CPU from the free memory)",
            "SIZE",
            "Not with `--num-blocks`.",
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "fp8", "int8", "int4"],
        _help(
            "data type of the KV pool; auto: that of --dtype, fp8, int8: eight bits, int4: four, by token and head",
            more="All lose some accuracy ([quantization.md](quantization.md#what-it-changes)). fp8 is float8 (e4m3), "
            "and needs Triton kernels and compute capability 8.9; int8 and int4 need Triton kernels or the CPU "
            "operations ([quantization.md](quantization.md#kv-in-fewer-bits)).",
        ),
    ] = "auto"
    tier_dtype: Annotated[
        Literal["auto", "int8", "int4", "auto:int8", "auto:int4"],
        _help(
            "data type of KV in tiers below the device; auto: that of the pool, int8, int4: eight or four bits, "
            "auto:int8, auto:int4: of each tier the faster one, by measured times",
            more="Copies become smaller, and what comes back loses some accuracy. Peers and stores without the same "
            "type and bound never see these blocks ([tiers.md](tiers.md#tiers-in-fewer-bits)).",
        ),
    ] = "auto"
    tier_error_bound: Annotated[
        float,
        Meta(gt=0, le=1),
        _help(
            "largest error of a block in fewer bits, relative to its root mean square; other blocks stay exact",
            "SHARE",
            "Only with `--tier-dtype`. Typical are 0.006 for int8 and 0.08 for int4.",
        ),
    ] = 0.2
    kv_layout: Annotated[
        Literal["layers", "blocks"],
        _help(
            "whether the KV of one layer or that of one block is contiguous in the pool",
            more="With `blocks`, which needs Triton kernels or `--kv-mapping mmu`, blocks are copied, or mapped, in "
            "longer pieces.",
        ),
    ] = "layers"
    kv_mapping: Annotated[
        Literal["table", "mmu"],
        _help(
            "how attention finds a sequence's blocks; table: by its block table, mmu: at consecutive addresses, where "
            "they are mapped",
            more="`mmu` is an experiment ([experiments.md](experiments.md#page-tables-in-hardware)). It needs Linux, "
            "PyTorch's attention, and blocks that are whole pages ([operations.md](operations.md#sizing)).",
        ),
    ] = "table"
    host_memory: Annotated[
        str | None, _help("host memory for KV that is evicted from the device, such as 16GiB (default: none)", "SIZE")
    ] = None
    host_memory_dir: Annotated[
        str,
        _help(
            "folder of a memory file system in which host blocks survive a crash of the executor; none: they do not",
            "DIR",
        ),
    ] = SHARED_MEMORY
    keep_host_memory: Annotated[
        bool, _help("keep host blocks for the next executor also when this one exits normally")
    ] = False
    host_bandwidth: Annotated[
        str | None,
        _help("limit copies to and from the host to SIZE bytes per second in each direction, for experiments", "SIZE"),
    ] = None
    disk_cache: Annotated[
        str | None, _help("folder for KV that outlives all processes, and that executors share (default: none)", "DIR")
    ] = None
    disk_memory: Annotated[
        str, _help("bound of that folder, over all executors that share it and all models", "SIZE")
    ] = "16GiB"
    store: Annotated[
        str | None,
        _help(
            "Redis or Valkey server for KV that a fleet shares, such as redis://host:6379/0 (default: none)",
            "URL",
            "The server bounds its memory itself: `maxmemory` with `maxmemory-policy allkeys-lru`.",
        ),
    ] = None
    store_expire: Annotated[
        Positive | None, _help("seconds after which that server forgets a block (default: never)", "S")
    ] = None
    verify_copies: Annotated[
        bool, _help("keep checksums of host blocks, and verify them when the blocks are loaded")
    ] = False
    profile: Annotated[
        bool,
        _help(
            "measure how long steps and copies take before joining, for about a second",
            more="With `--no-profile` the cost model starts from guesses.",
        ),
    ] = True
    threads: Annotated[
        Positive | Literal["auto"],
        _help(
            "CPU threads of an executor; auto: OMP_NUM_THREADS, or the cores it may use",
            "N",
            "With `auto`, `pagewise serve` shares the cores out among its executors.",
        ),
    ] = "auto"
    trust_remote_code: Annotated[bool, _help("run Python code that comes with the model")] = False
    simulate: Annotated[bool, _help("invent tokens instead of running a model: for tests and benchmarks")] = False
    simulate_step: Annotated[float, Meta(ge=0), _help("seconds that a step takes with --simulate", "S")] = 0.0
    role: Annotated[
        Role,
        _help(
            "work of this executor: prompts, which go on elsewhere; decoding of prompts from elsewhere; or both",
            more="[operations.md](operations.md#prefill-and-decode-apart) says when that pays.",
        ),
    ] = "both"
    layer_groups: Annotated[
        bool,
        _help(
            "keep of layers with a window the tokens that they see; without it, they keep all tokens",
            more="Segments need all tokens, and a prefix hit may then end anywhere.",
        ),
    ] = True
    lend_blocks: Annotated[bool, _help("let other executors fetch blocks from this one, and fetch from them")] = True
    drain_timeout: Annotated[
        Seconds, _help("seconds that moving requests and cached blocks to other executors may take after SIGTERM", "S")
    ] = 30.0
    block_listen: Annotated[
        str | None,
        _help(
            "ZeroMQ endpoint from which other executors fetch blocks (default: a free port of the address that leads "
            "to --scheduler)"
        ),
    ] = None
    advertise: Annotated[
        str | None,
        _help("host name by which other executors reach this one (default: its address towards --scheduler)"),
    ] = None
    scheduler: Annotated[
        str, _help("the scheduler's ZeroMQ endpoint for executors, or file:PATH of it", "ENDPOINT")
    ] = "tcp://127.0.0.1:5757"
    executor_id: Annotated[str | None, _help("name of this executor (default: host name and process id)", "ID")] = None
    keys: KeysFolder = None
    key_name: Annotated[str, _help("name of this executor's key in the folder of keys", "NAME")] = "executor"
    plaintext: Plaintext = False


def without(*names: str) -> Meta:
    """Marks a part of a composed configuration: the whole sets these options of it, and does not offer them."""
    return Meta(extra={"without": names})


OF_NODES = ("nnodes", "node_rank", "master_addr", "master_port")
"""Options of an executor on several nodes, whose processes are started one by one, or by ``pagewise up``."""


ExitOnFailure = Annotated[
    bool,
    _help(
        "stop everything when one process cannot start, or keeps ending, while the others serve",
        more="Without it, such a process is started again after pauses of up to a minute, and `/health` says so.",
    ),
]


class GatewaysConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise gateways``: the options of each gateway, and the number of gateways."""

    gateway: Annotated[GatewayConfig, without("gateway_id", "reuse_port")] = GatewayConfig()
    gateways: Gateways = 1
    exit_on_failure: ExitOnFailure = False


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise serve``: the options of the services, and the number of each."""

    scheduler: Annotated[SchedulerConfig, without("listen", "listen_gateways", "service_status")] = SchedulerConfig()
    gateway: Annotated[GatewayConfig, without("scheduler", "gateway_id", "key_name", "reuse_port")] = GatewayConfig()
    executor: Annotated[ExecutorConfig, without("scheduler", "executor_id", "key_name", "role", *OF_NODES)] = (
        ExecutorConfig()
    )
    gateways: Gateways = 1
    executors: Executors = 1
    listen: Annotated[
        str | None, _help("ZeroMQ endpoint that executors connect to (default: a private ipc socket)", "ENDPOINT")
    ] = None
    listen_gateways: Annotated[
        str | None, _help("ZeroMQ endpoint that gateways connect to (default: a private ipc socket)", "ENDPOINT")
    ] = None
    exit_on_failure: ExitOnFailure = False


class UpConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise up``: the options of the services, and how a Ray cluster runs them."""

    scheduler: Annotated[
        SchedulerConfig, without("listen", "listen_gateways", "gateways_end_any_request", "service_status")
    ] = SchedulerConfig()
    gateway: Annotated[GatewayConfig, without("scheduler", "gateway_id", "key_name", "reuse_port", "host")] = (
        GatewayConfig()
    )
    executor: Annotated[
        ExecutorConfig,
        without("scheduler", "executor_id", "key_name", "role", "block_listen", "advertise", *OF_NODES),
    ] = ExecutorConfig()
    gateways: Gateways = 1
    executors: Executors = 1
    ray: Annotated[
        str,
        _help("the Ray cluster: HOST:PORT of its head, or auto for the one that this machine belongs to", "ADDRESS"),
    ] = "auto"
    name: Annotated[str, _help("name of this deployment in the cluster; several may run beside each other", "NAME")] = (
        "pagewise"
    )
    executor_cpus: Annotated[
        Positive,
        _help(
            "CPUs that each rank of an executor takes in the cluster",
            "N",
            "It is also the number of its threads, unless `--threads` says otherwise.",
        ),
    ] = 1
    min_executors: Annotated[
        Positive | None, _help("executors that stay when there is nothing to do (default: --executors)", "N")
    ] = None
    max_executors: Annotated[
        Positive | None, _help("executors that there may be when many requests wait (default: --executors)", "N")
    ] = None
    scale_queue: Annotated[
        Positive, _help("waiting sequences per executor above which more executors are started", "N")
    ] = 16
    scale_up_after: Annotated[Seconds, _help("seconds that a queue has to stay before executors are started", "S")] = (
        30.0
    )
    scale_down_after: Annotated[
        Seconds, _help("seconds without a queue after which an executor that is not needed is drained", "S")
    ] = 600.0


_GROUPS = {
    "model": (
        "revision served_model_name max_model_len device dtype kernels attention quantization quantization_text "
        "deterministic trust_remote_code simulate simulate_step"
    ),
    "batching": "max_num_seqs max_num_batched_tokens max_waiting max_waiting_tokens routing speculative_config",
    "KV cache": (
        "block_size num_blocks gpu_memory_utilization kv_memory kv_dtype tier_dtype tier_error_bound kv_layout "
        "kv_mapping host_memory host_memory_dir keep_host_memory disk_cache disk_memory store store_expire "
        "host_bandwidth verify_copies layer_groups role lend_blocks block_listen advertise storage_salted recovery "
        "eviction"
    ),
    "LoRA adapters": "enable_lora lora_modules max_loras max_lora_rank max_cpu_loras allow_runtime_lora_updating",
    "HTTP": (
        "host port reuse_port allowed_hosts ssl_certfile ssl_keyfile max_connections keepalive_timeout "
        "write_timeout sse_keep_alive_interval max_body_bytes max_body_memory max_answer_memory max_n console "
        "console_shows_text enable_force_include_usage"
    ),
    "sampling": "generation_config override_generation_config",
    "conversations": (
        "enable_auto_tool_choice tool_call_parser reasoning_parser reasoning_config default_chat_template_kwargs"
    ),
    "API keys": (
        "api_keys_file share_cache public_metrics key_concurrent key_requests_per_minute key_tokens_per_minute"
    ),
    "processes": (
        "gateways executors tensor_parallel nnodes node_rank master_addr master_port profile cuda_graphs "
        "dependent_launch threads listen listen_gateways scheduler scheduler_timeout executor_id gateway_id "
        "gateway_timeout shutdown_timeout drain_timeout executor_timeout placement_timeout step_timeout "
        "exit_on_failure service_status"
    ),
    "observability": (
        "log_level log_format log_requests otlp_traces_endpoint kv_cache_metrics kv_cache_metrics_sample "
        "kv_events_config"
    ),
    "Ray": "ray name executor_cpus min_executors max_executors scale_queue scale_up_after scale_down_after",
    "security": "keys key_name plaintext gateways_end_any_request",
}

GROUPS = {title: tuple(names.split()) for title, names in _GROUPS.items()}
"""The names of options by group."""
