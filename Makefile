# The habits of this project. CI calls the same targets.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
TORCH := $(shell grep '^torch==' constraints.txt)
RAY ?= $(HOME)/.cache/pagewise-ray
RAY_VERSION := '$(shell sed -n 's/^    "\(ray>.*\)",/\1/p' pyproject.toml)'
AUDIT := $(PY) -m pip_audit -r constraints.txt --no-deps --disable-pip --format json
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-avx2 fuzz test-long test-agents test-console test-documents test-ray test-observability test-chaos soak gpu-smoke test-gpu test-compose test-packaging test-lowest test-newest test-cuda-build dist images lint audit sbom lock format types size bench bench-gpu experiments quality docs site clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## Make the virtual environment and install everything into it
	@ls $(CPU_OPERATIONS)/*.so >/dev/null 2>&1 || { \
	  echo "*** The CPU operations are not compiled. Models on the CPU are computed by PyTorch, which is slower."; \
	  echo "*** To try again (on Linux with glibc, with network): rm $(VENV)/.installed && make setup"; } >&2

CPU_OPERATIONS := kernels/pagewise_kernels/cpu
# uv installs in less time than pip (docs/performance.md#start). `make UV=` keeps to pip, which also does what uv cannot: uv reads
# neither pip's files nor its variables, of which those that name sources are passed on.
UV ?= $(shell command -v uv 2>/dev/null)
PIP_CALL := $(PY) -m pip install --quiet
UV_CALL := $(if $(UV),$(UV) pip install --quiet --python $(PY) --index-strategy unsafe-best-match \
  $(addprefix --find-links ,$(PIP_FIND_LINKS)) $(addprefix --index ,$(PIP_EXTRA_INDEX_URL)))
# $(call install,WHAT,INDEX): by uv if it is there, and by pip if it is not, or fails.
uv_from = $(UV_CALL) $(addprefix --default-index ,$(or $(2),$(PIP_INDEX_URL))) $(1) ||
install = { $(if $(UV),$(uv_from)) $(PIP_CALL) $(addprefix --index-url ,$(2)) $(1); }
EXTRAS := executor,dev
INSTALL := $(call install,-c constraints.txt -e '.[$(EXTRAS)]')

$(VENV)/.installed: pyproject.toml constraints.txt hatch_build.py $(CPU_OPERATIONS)/build.py $(wildcard $(CPU_OPERATIONS)/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Pagewise needs Python 3.11 or newer; this is $$($(PYTHON) --version). Set PYTHON=python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "The venv module is missing: apt install python3-venv"; exit 1; }
	@# torch first and by itself: TORCH_INDEX_URL then decides which build it is, for torch alone.
	$(call install,$(TORCH),$(TORCH_INDEX_URL))
	@rm -f $(CPU_OPERATIONS)/*.so
	@# This compiles the CPU operations, by a compiler that pip fetches. Everything works without them.
	$(INSTALL) || { \
	  echo "*** That failed, perhaps because the CPU operations could not be compiled. Installing without them:"; \
	  export HATCH_BUILD_NO_HOOKS=true; $(INSTALL); }
	@# Also without CPU operations: what needs no network goes on without one. Until they are there, setup says so.
	@touch $@

serve: setup ## Serve a model; options in ARGS="MODEL --port 8001 ..."
	@exec $(VENV)/bin/pagewise serve $(ARGS)

test: setup ## All tests that take seconds and need no GPU, Docker, browser or Prometheus
	@# Four processes for two cores, because many tests wait. A file's tests stay in one process, and in order;
	@# tests/conftest.py says in which order files are run.
	@# They start hundreds of others, which share compiled bytecode also where the environment forbids to write any.
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not long and not chaos and not gpu and not compose and not documents and not packaging and not observability and not browser" $(ARGS)

# The variables are those of PyTorch (and of the CPU operations), oneDNN, MKL, OpenBLAS and NumPy, in this order.
test-avx2: setup ## The tests of make test as on a processor with AVX2 and without AVX-512
	@ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell \
	NPY_DISABLE_CPU_FEATURES="$$($(PY) -c 'import numpy; print(*[name for name in numpy.show_config("dicts")["SIMD Extensions"].get("found", ()) if name == "X86_V4" or name.startswith("AVX512")])')" \
	$(MAKE) test

test-long: setup ## Tests that take minutes
	$(PY) -m pytest -m "long and not agents and not ray" $(ARGS)

test-agents: setup ## Agent frameworks call tools by way of Pagewise (installs them, beside it, into ~/.cache)
	$(PY) -m pytest -m agents $(ARGS)

test-console: setup ## The console in a headless Chromium; screenshots into build/console-screenshots
	@command -v chromium >/dev/null || { echo "The console is tested in Debian's Chromium: apt install chromium"; exit 1; }
	$(PY) -m pytest -m browser tests/console $(ARGS)

test-ray: setup ## Deployments on Ray clusters of several nodes (installs Ray, beside it, into ~/.cache; RAY=DIR takes another)
	@test -d $(RAY)/ray || $(PY) -m pip install --quiet --target $(RAY) $(RAY_VERSION)
	PYTHONPATH=$(PYTHONPATH):$(RAY) $(PY) -m pytest -m ray $(ARGS)

test-documents: setup ## Follow the README and the tutorial, command by command (with port 8000 free, or as root)
	$(PY) -m pytest -m documents $(ARGS)

test-observability: setup ## The dashboard and the alert rules with a real Prometheus (apt install prometheus)
	@command -v prometheus promtool >/dev/null || { echo "Prometheus is missing: apt install prometheus"; exit 1; }
	$(PY) -m pytest -m observability tests/observability $(ARGS)

fuzz: setup ## Fuzz the wire, plans and HTTP for minutes; longer with FUZZ_EFFORT=100
	FUZZ_EFFORT=$(or $(FUZZ_EFFORT),20) $(PY) -m pytest tests/fuzz --timeout 36000 $(ARGS)
	@$(PY) -c 'import atheris' 2>/dev/null || { echo "Not guided by coverage: $(VENV)/bin/pip install atheris"; exit 0; }; \
	  $(PY) -m tests.fuzz.guided -max_total_time=$$((3 * $(or $(FUZZ_EFFORT),20)))

test-chaos: setup ## Ten minutes of executors, gateways and a scheduler that are killed, frozen and cut off
	$(PY) -m pytest -m chaos -s $(ARGS)

soak: setup ## An hour of honest and abusive clients while processes come and go: does anything grow? SOAK_MINUTES=5
	$(PY) -m benchmarks.soak.run --minutes $(or $(SOAK_MINUTES),60) $(ARGS)

# A machine with a GPU is often lent for minutes, without a network: these three take what it has, and install nothing.
GPU_PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
FROM_HERE := PYTHONPATH=$(CURDIR):$(CURDIR)/shared:$(CURDIR)/kernels:$(CURDIR)/services/scheduler:$(CURDIR)/services/executor:$(CURDIR)/services/gateway:$(CURDIR)/services/cli:$(PYTHONPATH)

gpu-smoke: ## The first hour on a GPU, in five calls of 4 minutes; PART=1 for one, WHEELS=DIR for missing packages
	$(FROM_HERE) $(GPU_PY) -m benchmarks.gpu_smoke.run $(if $(PART),--part $(PART)) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

test-gpu: ## Tests that need a CUDA device
	$(FROM_HERE) $(GPU_PY) -m pytest -m gpu -o filterwarnings=default tests/kernels tests/executor $(ARGS)

test-compose: setup ## Build and try the containers (needs Docker with Compose v2)
	$(PY) -m pytest -m compose $(ARGS)

test-packaging: setup ## Build a wheel and an sdist, install them as a user does, and serve without a network
	$(PY) -m pytest -m packaging $(ARGS)

# Into ~/.cache/pagewise-versions, beside .venv; VERSIONS=DIR takes another folder, TORCH_INDEX_URL torch's CPU build.
test-lowest: setup ## The wire, HTTP, text and models with the lowest versions that pyproject.toml allows (installs them)
	$(PY) .ci/versions.py lowest $(ARGS)

test-newest: setup ## The same with the newest versions that the package index has
	$(PY) .ci/versions.py newest $(ARGS)

test-cuda-build: setup ## What needs no GPU, with the package index's CUDA build of torch (gigabytes)
	$(PY) .ci/versions.py cuda $(ARGS)

dist: setup ## A wheel and an sdist, into dist/
	$(call install,--require-hashes -r requirements/build.lock)
	$(PY) -m hatchling build --directory dist

images: ## The images, with labels that name the commit, and how large they are (needs Docker with Compose v2)
	@.ci/images.sh $(ARGS)

lint: setup ## ruff, import rules, private names of dependencies, bandit, known vulnerabilities of what is pinned
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) .ci/private_names.py
	$(VENV)/bin/bandit --quiet --recursive --configfile pyproject.toml services shared kernels
	@$(PY) .ci/audit.py $(AUDIT)

audit: setup ## Known vulnerabilities of what is pinned; fails if it cannot look
	@$(PY) .ci/audit.py --strict $(AUDIT)

sbom: setup ## Bills of materials (CycloneDX) of the images, into dist/sbom
	$(PY) .ci/sbom.py dist/sbom

lock: setup ## What the images install, with hashes, into requirements/ (needs the network, and uv)
	$(PY) .ci/lock.py uv

format: setup ## Put the code into shape
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: setup ## mypy, strict
	$(VENV)/bin/mypy -p pagewise_shared -p pagewise_kernels -p pagewise_gateway -p pagewise_scheduler -p pagewise_executor -p pagewise -p benchmarks
	@# Scripts one by one: several have the same name.
	for script in examples/*/*.py benchmarks/*/run.py docs/tables.py docs/site/hooks.py; do $(VENV)/bin/mypy $$script || exit 1; done

size: setup ## How large the product is, and how much of it a request runs through; ARGS="--commit COMMIT" beside a commit
	$(PY) -m benchmarks.size.run $(ARGS)

bench: setup ## Measure: the start, the control plane, serving over HTTP
	$(PY) -m benchmarks.start.run
	$(PY) -m benchmarks.control_plane.run
	$(PY) -m benchmarks.serving.run

bench-gpu: ## Measure on a GPU: kernels beside their peers, the engine beside others (10 minutes)
	$(FROM_HERE) $(GPU_PY) -m benchmarks.kernels.run --json benchmarks/results/kernels-gpu.json
	$(FROM_HERE) $(GPU_PY) -m benchmarks.engine.run --json benchmarks/results/engine-gpu.json
	$(FROM_HERE) $(GPU_PY) -m benchmarks.summary benchmarks/results/kernels-gpu.json benchmarks/results/engine-gpu.json

experiments: setup ## The experiments of docs/experiments.md: tables and figures anew (about an hour)
	$(PY) -m benchmarks.orca.run --json benchmarks/results/orca.json --plot docs/figures/orca.svg
	$(PY) -m benchmarks.eviction.run --json benchmarks/results/eviction.json --plot docs/figures/eviction.svg
	$(PY) -m benchmarks.layer_groups.run --json benchmarks/results/layer-groups.json
	$(PY) -m benchmarks.layer_groups.hits --json benchmarks/results/layer-groups-hits.json
	$(PY) -m benchmarks.layer_groups.stored_once --json benchmarks/results/stored-once.json
	$(PY) -m benchmarks.recovery.run --json benchmarks/results/recovery-cpu.json --plot docs/figures/recovery.svg
	$(PY) -m benchmarks.recovery.storage --json benchmarks/results/recovery-storage-cpu.json
	$(PY) -m benchmarks.kv_mapping.run --json benchmarks/results/kv-mapping.json --plot docs/figures/kv-mapping.svg
	$(PY) -m benchmarks.cpu_steps.run --kernels torch torch+mmu cpu --cases "decode 1" "decode 16" "decode 32" "prefill 512" --threads 1 --json benchmarks/results/kv-mapping-steps.json
	$(PY) -m benchmarks.thrash.run --json benchmarks/results/thrash.json
	$(PY) -m benchmarks.routing.run --jobs 2 --json benchmarks/results/routing.json --plot docs/figures/routing.svg
	$(PY) -m benchmarks.routing.processes --json benchmarks/results/routing-cpu.json
	$(PY) -m benchmarks.segments.run --json benchmarks/results/segments.json
	$(PY) -m benchmarks.segments.quality --json benchmarks/results/segments-quality.json
	$(PY) -m benchmarks.segments.questions --json benchmarks/results/segments-questions.json
	$(PY) -m benchmarks.roles.run --jobs 2 --json benchmarks/results/roles.json
	$(PY) -m benchmarks.roles.processes --json benchmarks/results/roles-cpu.json

# MODEL: of any folder or name that serves as the first argument of `pagewise serve`. More options in ARGS="--text FILE".
quality: setup ## What fewer bits cost in quality: weights, KV and tiers in each format beside float32, of MODEL
	$(PY) -m benchmarks.quantization.run --model $(or $(MODEL),pagewise-demo) $(ARGS)

docs: setup ## Make the tables of options and metrics anew; check that documents point at what exists
	$(PY) -m docs.tables
	$(PY) -m pytest tests/architecture/test_documents.py tests/architecture/test_operations.py

site: setup ## The documentation as a site, in dist/site (no network; warnings are errors)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
