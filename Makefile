# One place for every chore. `make` lists them. Works from any directory (make -C PATH) and in paths with spaces:
# every path below is relative to this file.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help bench setup test test-unit test-integration test-vllm chaos fuzz demo distill lint format clean

PY := .venv/bin/python
STAMP := .venv/.installed
# Set in some shells, it makes every process compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
VLLM_PY := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/.installed
UNUSED := /site-packages/(transformers/models/[^_aq]|torch/testing/|.*/tests?/)

# A copied or moved checkout would go on running the sources of the old place: install again.
ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(STAMP)
endif

# Sets $found to a Python that is new enough, or says what to do.
define FIND_PYTHON
found=; for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python; do \
    [ -n "$$python" ] && command -v "$$python" >/dev/null 2>&1 || continue; \
    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
    found=$$python; break; \
  done; \
  if [ -z "$$found" ]; then \
    echo "error: found no Python of at least 3.11 that can make a virtual environment."; \
    echo "  Install one (apt install python3 python3-venv, brew install python, uv python install),"; \
    echo "  or say where it is: make $(MAKECMDGOALS) PYTHON=path/to/python3"; \
    exit 1; \
  fi >&2
endef

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

setup: $(STAMP)  ## make .venv and install everything into it, with the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@rm -f $(STAMP)
	@$(FIND_PYTHON); \
	echo "==> .venv: a virtual environment of $$("$$found" --version)"; \
	$(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || "$$found" -m venv --clear .venv
	@echo "==> installing this package and what it needs, versions of constraints.txt (minutes when nothing is cached)"
	@$(PY) -m pip install --disable-pip-version-check --no-compile --progress-bar off -e '.[dev]' -c constraints.txt \
	  > .venv/install.log 2>&1 \
	  || { grep -v '^WARNING' .venv/install.log | tail -n 15; echo "error: pip failed, all of it: .venv/install.log"; exit 1; } >&2
	@echo "==> compiling it on all cores (pip would take one, and models and tests that nobody imports)"
	@$(PY) -m compileall -q -j 0 -x '$(UNUSED)' "$(CURDIR)/.venv/lib" >> .venv/install.log 2>&1 || true
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
	@echo "==> ready: . .venv/bin/activate && rl --help"

test: test-unit test-integration  ## setup, then all tests

test-unit: setup  ## tests of single rooms, and of what the documents promise
	@echo "==> unit tests"
	@$(PY) -m pytest tests/unit tests/contract -n auto --dist worksteal

test-integration: setup  ## tests that start the real commands
	@echo "==> integration tests: the real commands with a tiny model"
	@$(PY) -m pytest tests/integration

test-vllm: $(VLLM_STAMP)  ## make .venv-vllm with a real vLLM, then the tests against it (many minutes)
	@echo "==> tests against a real vLLM: $$($(VLLM_PY) -c 'import vllm; print(vllm.__version__)' 2>/dev/null)"
	@$(VLLM_PY) -m pytest tests/integration/test_vllm.py tests/integration/test_vllm_exports.py \
	  tests/integration/test_vllm_backend.py

$(VLLM_STAMP): dev/install_vllm.py pyproject.toml
	@rm -f $(VLLM_STAMP)
	@$(FIND_PYTHON); \
	echo "==> .venv-vllm: a virtual environment of $$("$$found" --version)"; \
	$(VLLM_PY) -c 'import pip' 2>/dev/null || "$$found" -m venv --clear .venv-vllm
	@echo "==> installing vLLM and this package (minutes, gigabytes when nothing is cached)"
	@$(VLLM_PY) dev/install_vllm.py > .venv-vllm/install.log 2>&1 \
	  || { tail -n 15 .venv-vllm/install.log; echo "error: pip failed, all of it: .venv-vllm/install.log"; exit 1; } >&2
	@touch $(VLLM_STAMP)

SEEDS ?= 0-59
TRIALS ?= 10000

chaos: setup  ## setup, then faults at random moments: real processes (SEEDS=0-59) and virtual time (TRIALS=10000)
	@echo "==> chaos: $(TRIALS) runs in virtual time"
	@NUM_TRIALS=$(TRIALS) $(PY) -m pytest -q tests/unit/test_virtual_chaos.py
	@echo "==> chaos: runs with real processes, seeds $(SEEDS)"
	@$(PY) tests/integration/chaos.py --seeds $(SEEDS)

EXAMPLES ?= 100

fuzz: setup  ## setup, then wrong configs, files and requests: hypothesis and schemathesis, EXAMPLES=100 of each kind
	@echo "==> fuzz: configs, files, messages and requests"
	@FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest -q tests/unit/test_fuzz.py
	@echo "==> fuzz: the inference server against its own description"
	@$(PY) -m pip install --disable-pip-version-check -q -e '.[fuzz]' -c constraints.txt
	@$(PY) tests/integration/fuzz_server.py --max-examples $(EXAMPLES)

demo: setup  ## setup, then SFT, asynchronous RL and evaluations of a tiny model on the CPU
	@echo "==> demo"
	@$(PY) scripts/demo.py

distill: setup  ## setup, then context distillation of a tiny model on the CPU: SFT, distillation, what was learnt
	@echo "==> distill"
	@$(PY) scripts/distill.py

BENCH ?= startup sync exact orchestrator fleet tail road examples distill nanochat trainer grpo engine

bench: setup  ## setup, then benchmarks beside their peers, into docs/benchmarks.md (hours; BENCH="grpo tail" for some)
	@for name in $(BENCH); do \
	  echo "==> bench_$$name"; $(PY) benchmarks/bench_$$name.py || echo "bench_$$name: a threshold was missed"; \
	done
	@$(PY) benchmarks/report.py

lint: setup  ## style, imports, types
	@echo "==> ruff check" && $(PY) -m ruff check .
	@echo "==> ruff format" && $(PY) -m ruff format --check .
	@echo "==> mypy --strict src" && $(PY) -m mypy

format: setup  ## put style and imports right
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

clean:  ## remove build left-overs and caches; .venv and outputs stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests scripts environments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	@echo "==> caches are gone; .venv and outputs are still here"
