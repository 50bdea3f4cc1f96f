# Development commands; `make` lists them. Works from any directory (make -C PATH) and in paths with spaces:
# every path below is relative to this file.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help bench docs gpu gpu-bundle setup test test-unit test-integration test-extras test-peers test-lm-eval \
  test-agents test-tasksets test-tinker test-vllm test-all chaos fuzz demo demo-real distill lint format clean

PY := .venv/bin/python
STAMP := .venv/.installed
# If set in the shell, every process would recompile every module.
unexport PYTHONDONTWRITEBYTECODE
VLLM_PY := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/.installed
PEERS_PY := .venv-peers/bin/python
PEERS_STAMP := .venv-peers/.installed
EXTRAS_STAMP := .venv/.test-extras
# DATA=<folder with aqua/, gsm8k/, boxoban/> and SPEC=<folder of the documents> enable the tests that read them.
find_folder = $(or $(shell cd "$($1)" 2>/dev/null && pwd),$(error $1="$($1)" is not a folder))
ifeq "$(origin DATA)" "command line"
export PRIME_TEST_DATA := $(call find_folder,DATA)
endif
ifeq "$(origin SPEC)" "command line"
export PRIME_TEST_SPEC := $(call find_folder,SPEC)
endif
UNUSED := /site-packages/(transformers/models/[^_aq]|torch/testing/|.*/tests?/)

# Reinstall in a copied or moved checkout, which would otherwise run the sources at the old path.
ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(STAMP)
endif

# Sets $found to a recent Python, or prints instructions.
define FIND_PYTHON
found=; for python in "$(PYTHON)" python3 python3.13 python3.12 python3.11 python; do \
    [ -n "$$python" ] && command -v "$$python" >/dev/null 2>&1 || continue; \
    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
    found=$$python; break; \
  done; \
  if [ -z "$$found" ]; then \
    echo "error: found no Python of at least 3.11 that can make a virtual environment."; \
    echo "  Install one (apt install python3 python3-venv, brew install python, uv python install),"; \
    echo "  or set its path: make $(MAKECMDGOALS) PYTHON=path/to/python3"; \
    exit 1; \
  fi >&2
endef

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

setup: $(STAMP)  ## create .venv and install the package, with the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@rm -f $(STAMP)
	@$(FIND_PYTHON); \
	echo "==> .venv: a virtual environment of $$("$$found" --version)"; \
	$(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || "$$found" -m venv --clear .venv
	@echo "==> installing this package and its dependencies, versions of constraints.txt (minutes without a cache)"
	@$(PY) -m pip install --disable-pip-version-check --no-compile --progress-bar off -e '.[dev]' -c constraints.txt \
	  > .venv/install.log 2>&1 \
	  || { grep -v '^WARNING' .venv/install.log | tail -n 15; echo "error: pip failed, full log: .venv/install.log"; exit 1; } >&2
	@echo "==> compiling on all cores, without unused models and tests (pip uses one core)"
	@$(PY) -m compileall -q -j 0 -x '$(UNUSED)' "$(CURDIR)/.venv/lib" "$(CURDIR)/src" >> .venv/install.log 2>&1 || true
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
	@echo "==> ready: . .venv/bin/activate && rl --help"

test: test-unit test-integration  ## setup, then all quick tests

test-unit: setup  ## unit tests, and contract tests of documented names
	@echo "==> unit tests"
	@$(PY) -m pytest tests/unit tests/contract -n auto --dist worksteal

test-integration: setup  ## tests that start the real commands
	@echo "==> integration tests: the real commands with a tiny model"
	@$(PY) -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder

test-extras: $(EXTRAS_STAMP)  ## setup, then install the packages and the browser that optional tests need
	@$(PY) dev/install_system.py chromium

$(EXTRAS_STAMP): $(STAMP)
	@echo "==> installing trackers, playwright and Triton, versions of constraints.txt"
	@$(PY) -m pip install --disable-pip-version-check --no-compile --progress-bar off -e '.[test]' -c constraints.txt \
	  > .venv/install-extras.log 2>&1 \
	  || { tail -n 15 .venv/install-extras.log; echo "error: pip failed: .venv/install-extras.log"; exit 1; } >&2
	@touch $(EXTRAS_STAMP)

docs: $(EXTRAS_STAMP)  ## build the documentation site: docs/_build/html/index.html
	@$(PY) -m sphinx -q -E -W --keep-going -b html docs docs/_build/html

test-peers: $(PEERS_STAMP)  ## create .venv-peers with TRL, verl, Liger and Ray, then run loss oracles and cluster tests
	@echo "==> tests against peers"
	@$(PEERS_PY) -m pytest tests/unit/rollouts/test_loss_oracles.py tests/unit/rollouts/test_library_losses.py \
	  tests/unit/rollouts/test_distill.py tests/unit/prime_rl/pretrained/test_llama_cpp.py \
	  tests/integration/test_clusters.py -m ''

$(PEERS_STAMP): $(STAMP) dev/install_peers.py
	@rm -f $(PEERS_STAMP)
	@echo "==> .venv-peers: TRL, verl, Liger and Ray over the packages of .venv (minutes without a cache)"
	@$(PY) -m venv --clear .venv-peers
	@$(PEERS_PY) dev/install_peers.py > .venv-peers/install.log 2>&1 \
	  || { tail -n 15 .venv-peers/install.log; echo "error: pip failed, full log: .venv-peers/install.log"; exit 1; } >&2
	@touch $(PEERS_STAMP)

LM_EVAL := .venv-lm-eval/bin/lm_eval

test-lm-eval: setup  ## create .venv-lm-eval with lm-evaluation-harness, then run it against our server (minutes)
	@[ -x $(LM_EVAL) ] || { $(PY) -m venv --clear .venv-lm-eval && \
	  .venv-lm-eval/bin/python -m pip install --disable-pip-version-check -q 'lm-eval[api]==0.4.13' transformers; }
	@$(PY) -m pytest tests/integration/test_lm_eval.py -m slow

TINKER := .venv-tinker/bin/python

test-tinker: setup  ## create .venv-tinker with tinker and its cookbook, then run recipes against serve (minutes)
	@$(TINKER) -c 'import tinker_cookbook' 2>/dev/null || { $(PY) -m venv --clear .venv-tinker && \
	  $(TINKER) -m pip install --disable-pip-version-check -q tinker==0.38.0 'tinker-cookbook[math-rl]==0.5.8' \
	  'torch>=2.11,<2.14'; }
	@$(PY) -m pytest tests/integration/test_tinker.py tests/integration/test_tinker_restart.py \
	  tests/integration/test_tinker_recipes.py -m slow

VERIFIERS_V1 := .venv-v1/bin/python

test-tasksets: setup  ## create .venv-v1 with verifiers 0.4, then compare its tasksets with ours and train on one (minutes)
	@[ -x $(VERIFIERS_V1) ] || { $(PY) -m venv --clear .venv-v1 && \
	  $(VERIFIERS_V1) -m pip install --disable-pip-version-check -q 'verifiers[ta]==0.4.0' uv; }
	@$(PY) -m pytest tests/integration/test_tasksets.py -m slow

AGENTS_PYTHON := .venv-agents/bin/python

test-agents: setup  ## create .venv-agents with the stock clients of model APIs, then train through them (minutes)
	@[ -x $(AGENTS_PYTHON) ] || { $(PY) -m venv --clear .venv-agents && \
	  $(AGENTS_PYTHON) -m pip install --disable-pip-version-check -q openai anthropic openai-agents; }
	@$(PY) -m pytest tests/integration/test_agent_training.py -m slow

test-all: test-extras $(PEERS_STAMP) $(VLLM_STAMP)  ## install all test dependencies, then run every test (hours; DATA=, SPEC=)
	@$(PY) dev/install_system.py iproute2 slurm-wlm munge kubernetes-client || true
	@$(PY) dev/test_all.py

test-vllm: $(VLLM_STAMP)  ## create .venv-vllm with a real vLLM, then run the tests against it (many minutes)
	@echo "==> tests against a real vLLM: $$($(VLLM_PY) -c 'import vllm; print(vllm.__version__)' 2>/dev/null)"
	@$(VLLM_PY) -m pytest tests/integration/test_vllm.py tests/integration/test_vllm_exports.py \
	  tests/integration/test_vllm_runs.py tests/integration/test_vllm_sampling.py

$(VLLM_STAMP): dev/install_vllm.py pyproject.toml
	@rm -f $(VLLM_STAMP)
	@$(FIND_PYTHON); \
	echo "==> .venv-vllm: a virtual environment of $$("$$found" --version)"; \
	$(VLLM_PY) -c 'import pip' 2>/dev/null || "$$found" -m venv --clear .venv-vllm
	@echo "==> installing vLLM and this package (minutes, gigabytes without a cache)"
	@$(VLLM_PY) dev/install_vllm.py > .venv-vllm/install.log 2>&1 \
	  || { tail -n 15 .venv-vllm/install.log; echo "error: pip failed, full log: .venv-vllm/install.log"; exit 1; } >&2
	@touch $(VLLM_STAMP)

SEEDS ?= 0-59
TRIALS ?= 10000

chaos: setup  ## setup, then random fault injection: real processes (SEEDS=0-59) and virtual time (TRIALS=10000)
	@echo "==> chaos: $(TRIALS) runs in virtual time"
	@NUM_TRIALS=$(TRIALS) $(PY) -m pytest -q tests/unit/prime_rl/orchestrator/test_virtual_chaos.py
	@echo "==> chaos: runs with real processes, seeds $(SEEDS)"
	@$(PY) tests/integration/chaos.py --seeds $(SEEDS)

EXAMPLES ?= 100

fuzz: setup  ## setup, then fuzz configs, files and requests: hypothesis and schemathesis, EXAMPLES=100 of each kind
	@echo "==> fuzz: configs, files, messages and requests"
	@FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest -q tests/unit/repository/test_fuzz.py
	@echo "==> fuzz: the inference server against its OpenAPI schema"
	@$(PY) -m pip install --disable-pip-version-check -q -e '.[fuzz]' -c constraints.txt
	@$(PY) tests/integration/fuzz_server.py --max-examples $(EXAMPLES)

demo: setup  ## setup, then SFT, asynchronous RL and evaluations of a tiny model on the CPU
	@echo "==> demo"
	@$(PY) scripts/demo.py

demo-real: setup  ## setup, then RL of SmolLM2-135M-Instruct on the CPU (downloaded once), evaluated before and after
	@echo "==> demo-real"
	@$(PY) scripts/example.py examples/smollm2/sums

distill: setup  ## setup, then context distillation of a tiny model on the CPU: SFT, distillation, evaluation
	@echo "==> distill"
	@$(PY) scripts/distill.py

BENCH ?= startup sync exact exact_paths orchestrator gateway training_api fleet long_tail e2e examples distill nanochat trainer \
  prefix_tree grpo speculation engine

bench: setup  ## setup, then benchmarks against peers, into docs/benchmarks.md (hours; BENCH="grpo long_tail" for some)
	@for name in $(BENCH); do \
	  echo "==> bench_$$name"; $(PY) benchmarks/bench_$$name.py || echo "bench_$$name: missed a threshold"; \
	done
	@$(PY) benchmarks/report.py

gpu:  ## check everything that runs on a GPU, without setup or network (docs/gpu.md; GPU="kernels engine" for some)
	@$(or $(PYTHON),$(wildcard $(PY)),python3) -m dev.gpu $(GPU)

gpu-bundle: setup  ## setup, then download the packages that a bare GPU machine lacks to .gpu-bundle (FOR=3.12)
	@$(PY) -m dev.gpu.bundle $(if $(FOR),--python $(FOR))

lint: setup  ## check style, imports and types
	@echo "==> ruff check" && $(PY) -m ruff check .
	@echo "==> ruff format" && $(PY) -m ruff format --check .
	@echo "==> mypy --strict src" && $(PY) -m mypy

format: setup  ## fix style and imports
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

clean:  ## remove build files and caches; .venv and outputs stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests scripts environments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	@echo "==> removed caches; kept .venv and outputs"
