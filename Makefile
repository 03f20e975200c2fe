# Two commands matter: `make demo` and `make test`. Both set up first what they need, the demo no more than the package.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
FUZZ   ?= 100000
ATHERIS ?= 2000

BIN   := $(VENV)/bin
RUNS  := $(VENV)/.runs
STAMP := $(VENV)/.installed

# The version check of pyright's wrapper would ask the network on every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow test-cuda test-zoo test-hosts crash fuzz audit lint format types layers docs bench-step wheel clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) (3.11 or newer), VENV=$(VENV), JOBS=$(JOBS) (test processes)"

setup: $(STAMP) ## Create the virtual environment, with the pinned versions of the package and of all tools

$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(STAMP): $(RUNS)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@

demo: $(RUNS) ## Prune a small network on embedded data to 20% of its FLOPs
	$(BIN)/dllp prune --data digits --model small_cnn --keep-flops 0.2 --particles 2 --granularity channel --threads 1 --out runs/demo --overwrite

test: lint types layers ## Lint, types, layers, and all tests but the slow ones, with coverage
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not zoo" --cov --cov-report=term --cov-fail-under=95

test-slow: $(STAMP) ## The tests that take minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow

test-cuda: $(STAMP) ## The tests that need a GPU; all others see none
	DLLP_TEST_CUDA=1 $(BIN)/python -m pytest -m cuda

# in a folder of their own: transformers imports a torchvision that it finds, and one for CUDA fails beside a CPU torch
test-zoo: $(STAMP) ## 61 networks of timm, transformers and torchvision, which it installs; writes results/structure
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target build/zoo -c constraints.txt timm torchvision
	PYTHONPATH=build/zoo OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m zoo

lint: $(STAMP) ## Check style, formatting, and what bandit thinks unsafe
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive dllp paper benchmarks

format: $(STAMP) ## Repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(STAMP) ## Check that modules import in one direction only
	$(BIN)/lint-imports

docs: $(STAMP) ## Build the documentation into build/site, warnings as errors; needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-hosts: $(STAMP) ## Two hosts joined by a link that is cut in mid-run (needs root and ip)
	$(BIN)/python -m tests.robustness.hosts

crash: $(STAMP) ## Kill runs 300 times, some of the demo, and compare what they end with (results/trust/summary.json)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.robustness.crash.harness --kills 300 --demo 2 --summary results/trust/summary.json

fuzz: $(STAMP) ## Feed 100,000 damaged files to its readers, and atheris where it installs (results/trust/summary.json)
	-@$(BIN)/python -m pip install --quiet -c constraints.txt atheris
	OMP_NUM_THREADS=1 $(BIN)/python tests/robustness/fuzz/run.py --inputs $(FUZZ) --atheris $(ATHERIS) --out results/trust/summary.json

audit: $(STAMP) ## Known vulnerabilities of the pinned versions, where a database can be reached
	-@$(BIN)/python -m pip install --quiet -c constraints.txt pip-audit
	$(BIN)/python tests/robustness/audit.py

bench-step: $(STAMP) ## Time and memory of one step, as ratios to plain training
	$(BIN)/python benchmarks/step.py

wheel: $(STAMP) ## Build sdist and wheel, install the wheel elsewhere and start it
	rm -rf dist
	$(BIN)/python -m build
	set -e; there=$$(mktemp -d); trap 'rm -rf "$$there"' EXIT; \
	$(BIN)/python -m pip install --quiet --no-deps --target "$$there" dist/*.whl; \
	python="$(abspath $(BIN))/python"; export PYTHONPATH="$$there"; cd "$$there"; \
	"$$python" -c 'import dllp, sys; sys.exit(not dllp.__file__.startswith(sys.argv[1]))' "$$there"; \
	bin/dllp --help

clean: ## Remove the environment, caches and build results (runs/ stays)
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find dllp paper tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
