# The images of the services, one target each: docker build --target scheduler|gateway|executor .
# The base image is pinned by the digest of its index of all platforms; PYTHON_IMAGE takes another one, of a mirror for instance.
ARG PYTHON_IMAGE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
FROM ${PYTHON_IMAGE} AS python
# How pip finds packages may be passed in; as build arguments nothing of it stays in the images.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST

FROM python AS source
WORKDIR /src
COPY requirements/build.lock .
RUN pip install --no-cache-dir --require-hashes -r build.lock
COPY . .

FROM source AS wheel
# The operations in C are the executor's.
RUN HATCH_BUILD_NO_HOOKS=true pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM source AS executor-wheel
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# Everything that an image gets lies in /app/venv. Two builds give the same layers: files have the first time that a wheel can
# name, in 1980, and bytecode has hashes of its sources in it and no times.
FROM python AS venv
ENV PIP_PYTHON=/app/venv/bin/python PIP_COMPILE=false
# A COPY gives the folder that it names a new time, but not those inside: so /app is one inside.
RUN mkdir --parents /image/app && ln --symbolic /image/app /app && python -m venv --without-pip /app/venv

# Ours is a layer of its own, so that a change of our code does not install the others again.
FROM venv AS ours
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl --root /ours \
    && python -m compileall -q --invalidation-mode unchecked-hash -s /ours /ours/app/venv/lib \
    && find /ours -exec touch --no-dereference --date @315532800 {} +

FROM venv AS executor-ours
COPY --from=executor-wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl --root /ours \
    && python -m compileall -q --invalidation-mode unchecked-hash -s /ours /ours/app/venv/lib \
    && find /ours -exec touch --no-dereference --date @315532800 {} +

# Of packages compileall may fail: one may have a file that is no Python of this version. pip would not compile it either.
FROM venv AS scheduler-packages
WORKDIR /locks
COPY requirements/scheduler.lock ./
RUN pip install --no-cache-dir --require-hashes -r scheduler.lock
RUN python -m compileall -qq --invalidation-mode unchecked-hash /app/venv/lib; \
    find /image -exec touch --no-dereference --date @315532800 {} +

FROM venv AS gateway-packages
WORKDIR /locks
COPY requirements/gateway.lock ./
RUN pip install --no-cache-dir --require-hashes -r gateway.lock
RUN python -m compileall -qq --invalidation-mode unchecked-hash /app/venv/lib; \
    find /image -exec touch --no-dereference --date @315532800 {} +

# The CPU build of torch by default; compose.gpu.yaml builds the CUDA one.
FROM venv AS executor-packages
# The package index that torch comes from, and with it the build: CPU, or a version of CUDA. Left empty, it is
# PyTorch's CPU index, unless pip was told about a source of your own: then torch comes from there too.
ARG TORCH_INDEX_URL
WORKDIR /locks
# What has one set of hashes, then torch. Of torch each build has hashes of its own, so it is not checked; what it needs
# beside the locked packages (CUDA) is not either.
COPY requirements/executor.lock constraints.txt ./
RUN pip install --no-cache-dir --require-hashes -r executor.lock
RUN if [ -z "$TORCH_INDEX_URL$PIP_INDEX_URL$PIP_FIND_LINKS" ]; then \
      TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu; \
    fi \
    && pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' constraints.txt)"
# On a CPU nothing launches Triton's kernels: a gigabyte. Nobody compiles against torch here, nor runs its own tests.
RUN if /app/venv/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then \
      pip uninstall --yes triton; \
    fi \
    && rm -rf /app/venv/lib/python3.11/site-packages/torch/include /app/venv/lib/python3.11/site-packages/torch/share \
      /app/venv/lib/python3.11/site-packages/torch/test /app/venv/lib/python3.11/site-packages/torch/bin/test* \
    && find /app/venv \( -name __pycache__ -o -path '*/numpy/*/tests' -o -path '*/sympy/*/tests' -o -path '*/networkx/*/tests' \) \
      -prune -exec rm -rf {} +
RUN python -m compileall -qq --invalidation-mode unchecked-hash /app/venv/lib; \
    find /image -exec touch --no-dereference --date @315532800 {} +

FROM ${PYTHON_IMAGE} AS service
RUN SOURCE_DATE_EPOCH=315532800 useradd --no-log-init --create-home --uid 10001 pagewise && mkdir /app \
    && touch --date @315532800 /etc/*- /etc/passwd /etc/shadow /etc/group /etc/gshadow /etc/subuid /etc/subgid \
      /home/pagewise/.[a-z]* /home/pagewise /app /etc /home /
WORKDIR /app
ENV PATH=/app/venv/bin:$PATH
LABEL org.opencontainers.image.licenses="Apache-2.0" org.opencontainers.image.base.name="docker.io/library/python:3.11-slim"

# The scheduler: block tables, routing, step plans. No torch, no tokenizer, no HTTP. `pagewise keys` runs here, too.
FROM service AS scheduler
# Volumes take the owner of the folder that they are mounted on first.
RUN install -d -o pagewise /keys /keys/public \
    && install -d -o pagewise -m 700 /keys/scheduler /keys/gateway /keys/executor \
    && touch --date @315532800 /keys/* /keys /
COPY --from=scheduler-packages /image/ /
COPY --from=ours /ours/ /
USER pagewise
ENV PAGEWISE_LISTEN=tcp://0.0.0.0:5757 PAGEWISE_LISTEN_GATEWAYS=tcp://0.0.0.0:5758
EXPOSE 5757 5758
# Healthy is: it listens. Whether it has executors is no reason to restart it, and shows at /health of its gateways.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=6 CMD ["python", "-m", "pagewise.healthcheck", "scheduler"]
CMD ["pagewise-scheduler"]
LABEL org.opencontainers.image.title="Pagewise scheduler"

# The gateway: HTTP, chat templates, tokenizing. No torch.
FROM service AS gateway
RUN install -d -o pagewise /models && touch --date @315532800 /models /
COPY --from=gateway-packages /image/ /
COPY --from=ours /ours/ /
USER pagewise
ENV HF_HOME=/models TRANSFORMERS_NO_ADVISORY_WARNINGS=1 PAGEWISE_HOST=0.0.0.0 PAGEWISE_PORT=8000 PAGEWISE_SCHEDULER=tcp://scheduler:5758
EXPOSE 8000
# Healthy is: it answers. /health is 503 until a scheduler and an executor are there, and that is no reason to restart it.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=6 CMD ["python", "-m", "pagewise.healthcheck", "gateway"]
CMD ["pagewise", "gateways"]
LABEL org.opencontainers.image.title="Pagewise gateway"

# Triton's kernels of models of common shapes, compiled ahead. Each entry of the cache names its files by their full paths.
FROM service AS executor-kernels
# GPUs to compile for, as "90:132 80:108": compute capability, and number of multiprocessors.
ARG COMPILE_FOR
COPY --from=executor-packages /image/ /
COPY --from=executor-ours /ours/ /
COPY kernels/shapes /shapes
RUN export TRITON_CACHE_DIR=/app/venv/share/pagewise/kernels && mkdir --parents $TRITON_CACHE_DIR \
    && for gpu in $COMPILE_FOR; do for model in /shapes/*; do \
      python -m pagewise_executor.compile_ahead "{\"config\": {\"model\": \"$model\"}, \"capability\": ${gpu%:*}, \
        \"num_sms\": ${gpu#*:}}" || exit 1; \
    done; done \
    && find /app/venv/share/pagewise -exec touch --date @315532800 {} +

# The executor: the KV pool and the model.
FROM service AS executor
RUN install -d -o pagewise /models /disk-cache && touch --date @315532800 /models /disk-cache /
COPY --from=executor-packages /image/ /
# Triton compiles a small launcher for each kernel with the C compiler when it is first launched, and says so only then.
# The CPU build launches none.
RUN if [ -d /app/venv/lib/python3.11/site-packages/triton ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=executor-kernels /app/venv/share/pagewise/ /app/venv/share/pagewise/
COPY --from=executor-ours /ours/ /
USER pagewise
ENV HF_HOME=/models PAGEWISE_SCHEDULER=tcp://scheduler:5757
# Healthy is: connected to the scheduler. Large models load for minutes before that.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["python", "-m", "pagewise.healthcheck", "executor"]
CMD ["pagewise-executor"]
LABEL org.opencontainers.image.title="Pagewise executor"
