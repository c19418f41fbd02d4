"""Options of ``vllm serve`` that can be given here: by another name, or because they ask for what is always so.

Those that have the same name and the same meaning need no line.
"""

from pagewise_shared.config.vllm.kinds import alias, always, api_keys, bytes_of, count, gib, one_of, only, opposite

ACCEPTED = (
    # By another name, or with vLLM's way to write a value.
    alias("--max-model-len", "max_model_len", "32k, 32K and -1 are understood as there", count),
    alias("--max-num-batched-tokens", "max_num_batched_tokens", "8k and 8K are understood as there", count),
    alias(
        "--dtype",
        "dtype",
        "half and float are understood as there; auto is float32 on a CPU",
        lambda text: {"half": "float16", "float": "float32"}.get(text, text),
    ),
    alias("--tensor-parallel-size -tp", "tensor_parallel", "the same"),
    alias("--device-memory-utilization", "gpu_memory_utilization", "the same"),
    alias("--kv-cache-memory-bytes", "kv_memory", "per GPU, as there; 25G and 25g are understood as there", bytes_of),
    alias("--num-gpu-blocks-override", "num_blocks", "the same, in blocks of --block-size tokens"),
    alias(
        "--kv-cache-dtype",
        "kv_dtype",
        "auto and fp8 (fp8_e4m3); fp8 needs no calibration, because each token and head has a scale of its own",
        one_of({"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}),
    ),
    alias(
        "--kv-offloading-size",
        "host_memory",
        "in GiB, for all ranks of an executor together, as there",
        gib,
    ),
    alias("--enforce-eager", "cuda_graphs", "switches --cuda-graphs off; models are not compiled anyway", opposite),
    alias("--api-server-count -asc", "gateways", "the same"),
    alias(
        "--api-key",
        "api_keys",
        "every process of this machine can read a command line: PAGEWISE_API_KEYS or --api-keys-file are safer. A key "
        "given so is an operator's, and goes to gateways by their environment. All endpoints but health probes want it",
        api_keys,
        many=True,
    ),
    alias("--speculative-config -sc", "speculative_config", "the method ngram alone"),
    alias(
        "--quantization -q", "quantization", "fp8 and int8 quantise while loading; a checkpoint says itself what it is"
    ),
    alias("--enable-log-requests", "log_requests", "a line when a request ends, without its text", bool),
    alias("--disable-log-requests", "log_requests", "of older releases", opposite),
    alias("--log-level", "log_level", "the same words, in either case, but for trace and critical", str.lower),
    # Always so.
    always(
        "--enable-prefix-caching", "cached KV is always found again; a request with a cache_salt of its own finds none"
    ),
    always("--enable-chunked-prefill", "prompts are always computed in chunks, beside decodes"),
    always("--async-scheduling", "two steps are always in flight"),
    always("--enable-prompt-tokens-details", "usage always has them"),
    always("--enable-request-id-headers", "answers always have X-Request-Id"),
    always("--enable-ssl-refresh", "certificates are always read again when their files change"),
    always("--language-model-only", "models take text only"),
    always("--use-tqdm-on-load", "the log says every five seconds how much is loaded"),
    always("--disable-custom-all-reduce", "ranks always use NCCL, or gloo on a CPU"),
    always("--disable-log-stats", "no statistics are logged; /metrics has them"),
    always("--disable-uvicorn-access-log", "there is no such log; --log-requests writes one"),
    always("--disable-chunked-mm-input --disable-cascade-attn --use-v2-block-manager", "there is no such thing"),
    always("--aggregate-engine-logging", "every process logs to the standard error of the one that has started it"),
    always("--enable-log-deltas", "texts are never logged"),
    # Values that ask for what is so anyway.
    only("--scheduling-policy", "fcfs priority", "requests run by priority, then by arrival, fairly between API keys"),
    only("--runner", "auto generate", "models generate text: there is no pooling"),
    only("--task", "auto generate", "models generate text: there is no pooling"),
    only("--convert", "auto none", "models generate text: there is no pooling"),
    only("--model-impl", "auto transformers", "models have the code of transformers, with attention of our own"),
    only("--load-format", "auto safetensors", "weights are read from safetensors; --simulate runs without any"),
    only("--config-format", "auto hf", "config.json describes the model"),
    only("--tokenizer-mode", "auto hf fast", "tokenizer.json is needed"),
    only(
        "--distributed-executor-backend", "mp uni", "ranks are processes; pagewise up starts executors on a Ray cluster"
    ),
    only("--generation-config", "vllm", "sampling defaults are OpenAI's; only the tokens that end a text come from it"),
    only("--max-logprobs", "20", "20 is the limit"),
    only(
        "--logprobs-mode", "raw_logprobs", "log-probabilities are those of the model, before penalties and temperature"
    ),
    only("--lora-dtype", "auto", "adapters have the type of the model"),
    only(
        "--cpu-offload-gb",
        "0",
        "weights stay on the device: --tensor-parallel, or a quantised checkpoint, makes them fit",
    ),
    only("--swap-space", "0", "it was per GPU: --host-memory SIZE is for all ranks of an executor together"),
    only(
        "--pipeline-parallel-size -pp",
        "1",
        "layers are not divided among devices (pipeline parallelism): use "
        "--tensor-parallel N, which divides each layer among the GPUs of one or several hosts",
    ),
    only("--data-parallel-size -dp", "1", "copies of a dense model are --executors N, each with its GPUs"),
    only(
        "--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp",
        "1",
        "a context lies on all ranks, divided by KV heads: --tensor-parallel N",
    ),
    only("--stream-interval", "1", "every round of steps is one event"),
    only("--sse-keep-alive-interval", "0", "streams have no comments in them"),
    only("--watermark", "0 0.0", "some blocks are always kept free for running requests"),
    only("--kv-offloading-backend", "native", "--host-memory, --disk-cache and --store are the tiers below the device"),
    only("--chat-template-content-format", "auto", "the template is tried out when it is loaded"),
    only("--response-role", "assistant", "answers are the assistant's"),
    only(
        "--nnodes -n",
        "1",
        "pagewise-executor has it, for ranks on several hosts; pagewise serve is for one",
    ),
    only("--prefix-caching-hash-algo", "sha256 sha256_cbor", "blocks are found by their tokens, not by a hash"),
)
