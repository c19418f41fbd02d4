"""Options of ``vllm serve`` that are not there: what to use instead, or why there is nothing."""

import re

from pagewise_shared.config.vllm.kinds import refused

_REFUSED = """
# The model.
--tokenizer --tokenizer-revision --code-revision --hf-config-path --skip-tokenizer-init
  the model's directory has its tokenizer and its configuration, of the one --revision
--hf-overrides --model-class-overrides --rope-scaling --rope-theta --disable-sliding-window
  config.json says what the model is: change it in a copy of the model's directory
--hf-token
  others see command lines: set HF_TOKEN in the environment, or log in with hf auth login
--download-dir
  set HF_HUB_CACHE in the environment, or give the path of a directory as MODEL
--ignore-patterns --model-loader-extra-config --pt-load-map-location --safetensors-load-strategy
--safetensors-prefetch-num-threads --safetensors-prefetch-block-size --max-parallel-loading-workers
  weights are read from safetensors in one way, tensor by tensor
--override-generation-config
  sampling parameters come with each request, and have OpenAI's defaults
--seed
  each request has a seed of its own: with seed in it, it samples the same tokens in any batch, on any executor
--quantization-config --allow-deprecated-quantization
  --quantization fp8 or int8, or a quantised checkpoint
--pooler-config --io-processor-plugin --max-lora-cls-labels --enable-flash-late-interaction
  there is no pooling
--diffusion-config -dc
  models that write all tokens of a text at once are not served
--enable-prompt-embeds
  prompts are text or token ids
--enable-return-routed-experts --return-sampling-mask --aux-output-config
  answers do not have this
--logits-processors
  code of others does not run in an executor; logit_bias, bad_words and grammars are fields
--use-fp64-gumbel --enable-trace-replay --watermark-config --reasoning-config
  sampling does not have this
--enable-sleep-mode --sleep-mode-backend --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names
--enable-cumem-allocator --enable-nccl-comm-suspend --weight-transfer-config
  executors are stopped and started instead: SIGTERM hands their requests and their cache to others
# Kernels.
--compilation-config -cc -O --optimization-level --performance-mode --ir-op-priority --kernel-config
  models are not compiled: --kernels says what computes them, --no-cuda-graphs switches graphs off
--cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture
  graphs are of up to 512 decodes, or 1,024 tokens; --no-cuda-graphs switches them off
--attention-backend --attention-config -ac --kv-cache-dtype-skip-layers --sparse-indexer-topk-backend
  --attention triton, gluon, fa3 or flashinfer says what computes attention of prompts
--moe-backend --linear-backend --monokernel --enable-flashinfer-autotune --gdn-prefill-backend --kda-prefill-backend
--kda-decode-backend
  --kernels says what computes the model
--mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds
--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --replayssm-buffer-len
--enable-mamba-shared-prefix-checkpoint --use-replayssm --disable-hybrid-kv-cache-manager
  models that keep a state are not served
# Many devices and hosts.
--enable-expert-parallel -ep --enable-ep-weight-filter --all2all-backend --enable-elastic-ep --elastic-ep-max-dp-size
--enable-eplb --eplb-config --expert-placement-strategy
  experts are not distributed whole (expert parallelism): use --tensor-parallel N, which divides each expert among the
  GPUs of one or several hosts
--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local -dpl --data-parallel-address -dpa
--data-parallel-rpc-port -dpp --data-parallel-backend -dpb --data-parallel-hybrid-lb -dph --data-parallel-external-lb
-dpe --data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port --dp-supervisor-probe-interval-s
--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --dp-sync-interval
--disable-nccl-for-dp-synchronization
  copies of the model are --executors N here, and pagewise-executor --scheduler tcp://HOST:PORT on other hosts; one
  scheduler routes among all of them
--headless --node-rank -r --master-addr --master-port
  pagewise-executor --scheduler tcp://HOST:PORT is an executor by itself, on any host, and has the last three for one
  whose ranks are on several hosts
--dcp-comm-backend --dcp-q-replicate --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --enable-hc-sp
--enable-batch-sharded-sampling --enable-dbo --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold
--enable-shm-tensor-arena
  ranks compute the same tokens at the same time, each with its KV heads
--device-ids
  set CUDA_VISIBLE_DEVICES in the environment
--numa-bind --numa-bind-nodes --numa-bind-cpus
  start pagewise serve with numactl
--distributed-timeout-seconds --cpu-distributed-timeout-seconds --enable-fault-tolerance --fault-tolerance-config
--watchdog-config
  an executor that hangs is given up after --step-timeout or --executor-timeout, and started again
--worker-cls --worker-extension-cls --scheduler-cls --additional-config --ray-workers-use-nsight
  there are no plugins
# KV cache and scheduling.
--kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config --engram-config
  executors fetch KV from each other by themselves; --disk-cache and --store outlive them
--offload-backend --cpu-offload-params --offload-group-size --offload-num-in-group --offload-prefetch-step
--offload-params
  weights stay on the device
--prefix-cache-retention-interval --prefix-match-unit --kv-sharing-fast-prefill --swa-bounded-replay
--calculate-kv-scales
  hits end anywhere in a block, and --eviction says what stays
--max-num-queued-reqs
  it counts running requests too; --max-waiting limits sequences that wait (429)
--max-num-queued-tokens
  it counts running prefills too; --max-waiting-tokens limits prompts that wait (429)
--max-num-active-seqs --max-num-scheduled-tokens
  --max-num-seqs and --max-num-batched-tokens limit a step
--long-prefill-token-threshold --long-prefill-token-threshold-adaptive --max-num-partial-prefills
--max-long-partial-prefills --prefill-schedule-interval --scheduler-reserve-full-isl --num-scheduler-steps
--num-lookahead-slots --preemption-mode --scheduler-delay-factor
  --max-num-batched-tokens bounds a step; how prompts share it is not an option
--spec-method --spec-model --spec-tokens --speculative-model --num-speculative-tokens
  --speculative ngram:K drafts K tokens; there are no draft models
# Text, images and adapters.
--limit-mm-per-prompt --enable-mm-embeds --media-io-kwargs --mm-processor-kwargs --mm-processor-cache-gb
--mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-only
--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --interleave-mm-strings --skip-mm-profiling
--video-pruning-rate --video-pruning-method --mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb
--mm-device-do-normalize --allowed-local-media-path --allowed-media-domains --trust-request-mm-kwargs
--default-mm-loras --enable-tower-connector-lora
  models take text only
--fully-sharded-loras --lora-target-modules --specialize-active-lora --enable-mixed-moe-lora-format
--enable-moe-shared-loras --enable-lora-bias --lora-extra-vocab-size
  adapters of all linear layers but experts are served, without such settings
--renderer-num-workers --tokenizer-pool-size
  each gateway tokenizes on threads: --gateways N starts more
--chat-template --trust-request-chat-template
  the model's own template renders: put another chat_template.jinja into a copy of its directory
--reasoning-parser-plugin --tool-parser-plugin --tool-server --tool-strict-level
  --tool-call-parser and --reasoning-parser name what there is; no code of others runs, and no tools
--exclude-tools-when-tool-choice-none --reasoning-effort-map --anthropic-disabled-thinking-effort
  requests say it: leave the tools out, or give chat_template_kwargs
--cohere-format --cohere-is-reasoning-model
  there is no API of Cohere's
--structured-outputs-config --guided-decoding-backend
  llguidance makes outputs match, without settings
--return-tokens-as-token-ids
  it is a field of requests
# HTTP.
--config
  each option is an environment variable too: --max-num-seqs is PAGEWISE_MAX_NUM_SEQS
--grpc --grpc-port --tokens-only --enable-scale-out
  there is HTTP alone; /v1/completions takes token ids
--uds
  HTTP is served on a port: --host 127.0.0.1 keeps it on this machine
--allow-credentials --allowed-origins --allowed-methods --allowed-headers --root-path --middleware
  a proxy in front does this; answers have no CORS headers
--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers
  clients show API keys, not certificates; TLS 1.2 and 1.3
--h11-max-incomplete-event-size --h11-max-header-count
  heads of requests have a fixed limit
--disable-fastapi-docs --enable-offline-docs
  there is no page of documents, and /openapi.json is always there
--enable-tokenizer-info-endpoint --enable-server-load-tracking
  there is no such endpoint; /metrics has the load
--enable-force-include-usage --enable-per-request-metrics --fingerprint-mode --fingerprint-value
  answers do not have this; streams have usage with stream_options
# What is told.
--uvicorn-log-level --logging-config --log-config-file --log-error-stack
  --log-level is for all processes, and lines go to standard error
--enable-log-outputs --max-log-len --disable-access-log-for-endpoints
  texts are never logged; --log-requests logs a line for each request
--collect-detailed-traces
  traces have all stages: --otlp-traces-endpoint URL sends them
--show-hidden-metrics-for-version --custom-histogram-buckets --kv-cache-metrics --kv-cache-metrics-sample
--cudagraph-metrics --per-request-spec-decode-metrics --enable-mfu-metrics --enable-layerwise-nvtx-tracing
--enable-logging-iteration-details --profiler-config --jit-monitor-mode --jit-monitor-verbose
  all metrics are always on; pagewise vmstat and pmap show the KV cache
--fail-on-environ-validation
  variables that are misspelt are named in a warning
"""
"""Options, and below them, indented, the reason."""

_ENTRY = re.compile(r"((?:^-.*\n)+)((?:^  .*\n)+)", re.MULTILINE)
REFUSED = tuple(refused(names, " ".join(text.split())) for names, text in _ENTRY.findall(_REFUSED))
