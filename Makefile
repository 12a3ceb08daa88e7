# make demo   train a small FP8 language model under the callback, and show what came out
# make test   lint, types and all tests but those marked `extended`
# make test-all   those too: signals, injected faults, ends of processes, other processors, further slow cases
# make test-quick   the first case of each test that is not marked slow, processes or extended: tests/quick.py
# make test-processors   all tests with the instructions of other processors, as far as this one has them, and with two threads
# make test-newest   all tests with the newest versions of all packages, in .venv-newest; WITH="transformers<5" takes an older one
# make mutants   changes one line of code at a time, and lists the changes that no test near the code notices; minutes.
#                ARGS="--count 60 --seed 7 --jobs 2 te_precision_callbacks/speed" takes other changes
# make install   only set up the environment for tests and checks
# make docs   the docs site, in site/; open site/index.html
# make te-suite TE_SRC=<checkout of NVIDIA/TransformerEngine>   Transformer Engine's own tests on the reference backend
# make gpu-check   on a machine with a GPU: whether all is right there, and what it costs; at most nine minutes.
#                  ARGS="--device cpu" GPU_PYTHON=.venv/bin/python runs the same code on a CPU
# make clients SRC=<folder of sources>   other people's training scripts, without the debugger and with it; tests/clients/README.md
# make proof   what the diagnosis says of planted defects, of published bugs and of healthy trainings, and whether its
#              remedies help, into benchmarks/proof/README.md; hours.
#              ARGS="--draws 12 --folder proof-runs" trains less, and goes on where it was interrupted
#
# Each sets up what it needs in .venv on its first call, and again where requirements.lock or pyproject.toml has changed:
# tools/environment.py. make docs: in .venv-docs, which holds the site's tools alone. make gpu-check sets up nothing: it takes
# the active Python, which has a torch for the GPU and perhaps a compiled Transformer Engine; GPU_PYTHON=... names another.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CAPABILITY ?= 9.0
FEATURES ?= te
BIN := $(VENV)/bin
GPU_PYTHON ?= $(shell command -v python || command -v python3)
DOCS_VENV ?= .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed

# Processes start sooner where Python may keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-quick test-processors test-newest tests mutants lint style types docs te-suite gpu-check clients \
	proof install install-demo clean
.DEFAULT_GOAL := test

install-demo:
	@$(PYTHON) tools/environment.py $(VENV) demo

install:
	@$(PYTHON) tools/environment.py $(VENV) all

# Threads that wait do not spin: where others use the processors too, spinning takes ten times as long.
demo: install-demo
	@echo "Training a language model of 3 FP8 layers for 32 steps. Importing takes a few seconds first."
	@OMP_WAIT_POLICY=passive $(BIN)/python examples/byte_lm.py

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy te_precision_callbacks features examples benchmarks docs/site tools

lint: style types

# One thread a process, and none that spins: the workers take all processors. No pool of processes compiles beside them, and
# torch does not try by compiling which of the processor's vector instructions the compiler knows.
ONE_THREAD = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1
# One worker more than processors, since tests wait for processes: on two, a tenth less time.
WORKERS = $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() + 1))")
PYTEST = $(ONE_THREAD) $(SETTING) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

MARKS = -m "not extended"
tests: install
	$(PYTEST) $(MARKS)

# The types are checked while the tests run: neither takes all processors all the time.
test: style
	@$(MAKE) --no-print-directory -j2 types tests

test-all: style
	@$(MAKE) --no-print-directory -j2 types tests MARKS=

test-quick: install
	$(PYTEST) --quick --durations 5

# torch and oneDNN choose their kernels by the processor, and these round differently. Inductor's cache mixes settings up.
SETTINGS = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2 \
	$(shell grep -qw avx2 /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx2) \
	$(shell grep -qw avx512f /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx512)
test-processors: install
	@for setting in $(SETTINGS); do \
		echo "$$setting"; \
		$(MAKE) --no-print-directory tests MARKS= SETTING="$$setting TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" || exit 1; \
	done

test-newest: BIN := .venv-newest/bin
test-newest:
	@$(PYTHON) tools/environment.py .venv-newest newest $(if $(WITH),"$(WITH)")
	$(PYTEST) $(ARGS)

mutants: install
	$(ONE_THREAD) $(BIN)/python -m tools.mutants $(ARGS)

$(DOCS_INSTALLED): requirements-docs.lock
	@echo "Setting up $(DOCS_VENV): this takes half a minute the first time."
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements-docs.lock
	@touch $@

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS_INSTALLED)
	$(DOCS_VENV)/bin/mkdocs build --strict

te-suite: install
	$(BIN)/python tests/reference/te_suite.py --te-src "$(TE_SRC)" --capability $(CAPABILITY) --features $(FEATURES) $(if $(WHOLE),--whole)

gpu-check:
	@$(GPU_PYTHON) benchmarks/gpu_check.py $(ARGS)

clients: install
	$(BIN)/python -m tests.clients --src "$(SRC)" $(if $(CACHE),--cache "$(CACHE)") --table tests/clients/README.md $(CLIENTS)

proof: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof/contest.py --page $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof/every_step.py --page $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof/external.py --page $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof/remedies.py --page $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof/search.py --page $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof/silence.py --page $(ARGS)

clean:
	rm -rf $(VENV) .venv-newest $(DOCS_VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
