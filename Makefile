# Two commands for a fresh machine: `make run` and `make test`. Both set everything up first.
# Needed beforehand: Python 3.11 or newer (with its venv module), make, and the package index.

PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.13 python3.11,$(if \
	$(shell $(p) -c 'import sys; print("yes" if sys.version_info >= (3, 11) else "")' 2>/dev/null),$(p))))
VENV ?= .venv
PY := $(VENV)/bin/python
QUICK ?= 1
WORKERS = $(or $(JOBS),2)
COLAB ?= dist/colab
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 600
BENCH ?= pipeline backtest boosters checkpoints training export_data serving
PART ?= slow contract notebooks peers browser dvc test-xla matrix

switch = $(if $(filter-out 0 false no,$(1)),$(2))
has_python = test -n "$(PYTHON)" || { echo "make $@: no Python 3.11 or newer found. Next: install one, or make PYTHON=path/to/python" >&2; exit 1; }
again = $(MAKE)# by another name: a recipe that says $(MAKE) itself runs under `make -n`
# The environment $(1) from the pins in requirements, files $(2) after each other; at once when they have not changed.
environment = $(PYTHON) .ci/environment.py $(1) $(patsubst %,requirements/%.txt,$(2))
# Values reach the shell through the environment, so that quotes and spaces in them are text.
export COLAB OWNER ROWS BENCH PART JOBS

.PHONY: help setup kernels run test soak fuzz mutants test-xla lint format notebooks browser bench matrix colab badges lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup:  ## the environment in .venv, from exact pins; at once when they have not changed
	@$(has_python)
	@$(call environment,$(VENV),locked/dev)

run: export ML_RUN_WORKSPACE := $(WORKSPACE)
run: export ML_RUN_DATA := $(DATA)
run: export ML_RUN_SYMBOL := $(SYMBOL)
run: export ML_RUN_MINUTES := $(MINUTES)
run: export ML_RUN_ZONE := $(ZONE)
run: export ML_RUN_STAMP := $(STAMP)
run: export ML_RUN_DECIMAL := $(DECIMAL)
run: export ML_RUN_COLUMNS := $(COLUMNS)
run: setup  ## the eight notebooks: DATA=bars.parquet SYMBOL=MES for your own bars; MINUTES=5 ZONE= STAMP= DECIMAL= COLUMNS=close=Last SKIP_BAD=1 STRICT=1 as prepare takes them, QUICK=0 for the full run, WORKSPACE=folder
	@$(PY) -m ml_factory suite $(call switch,$(QUICK),--quick) $(call switch,$(STRICT),--strict) \
		$(call switch,$(SKIP_BAD),--skip-bad) \
		$${ML_RUN_WORKSPACE:+--workspace "$$ML_RUN_WORKSPACE"} $${ML_RUN_DATA:+--data "$$ML_RUN_DATA"} \
		$${ML_RUN_SYMBOL:+--symbol "$$ML_RUN_SYMBOL"} $${ML_RUN_MINUTES:+--minutes "$$ML_RUN_MINUTES"} \
		$${ML_RUN_ZONE:+--zone "$$ML_RUN_ZONE"} \
		$${ML_RUN_STAMP:+--stamp "$$ML_RUN_STAMP"} $${ML_RUN_DECIMAL:+--decimal "$$ML_RUN_DECIMAL"} \
		$${ML_RUN_COLUMNS:+--columns "$$ML_RUN_COLUMNS"}

# Each of the tests' processes would compile what it meets first, some of it twice.
kernels: setup  ## compile numba's kernels once for this checkout
	@$(PY) -c 'from ml_factory.data import sessions, synthetic; from ml_factory.features.build import build_features; \
		bars = synthetic.synthetic_bars(days=15); build_features(bars, sessions.resolve_market_spec("DEMO", bars))'

test: WORKERS = $(or $(JOBS),3)# tests wait for their children
test: kernels  ## the tests, without whole notebooks and campaigns (`make soak`); ARGS='-k splits' goes to pytest
	@PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(SPREAD) -m 'not notebooks and not soak' $(ARGS)

mutants: setup  ## change the library in 100 places, one at a time, and count the changes that tests see; ARGS='--count 20 --suite contract --suite old'
	@$(PY) -m tests.mutants $(ARGS)

soak: setup  ## whole campaigns, hours; PART='contract slow' for some of them, ARGS go to each
	@for part in $$PART; do echo "soak: $$part"; case $$part in \
		slow) $(PY) -m pytest $(SPREAD) -m soak $(ARGS) ;; \
		contract) ML_FACTORY_TEST_PROFILE=campaign $(PY) -m pytest $(SPREAD) --dist worksteal --timeout 36000 tests/contract $(ARGS) ;; \
		peers) $(call environment,.venv-peers,peers) && \
			.venv-peers/bin/python -m pytest tests/models/test_peers.py --confcutdir tests/models -p no:cacheprovider $(ARGS) ;; \
		dvc) $(call environment,.venv-dvc,dvc) && \
			.venv-dvc/bin/python -m pytest tests/dvc --confcutdir tests/dvc -p no:cacheprovider $(ARGS) ;; \
		notebooks|browser|test-xla|matrix) $(again) $$part ;; \
		*) echo "make soak: no part $$part. Next: make help" >&2; exit 2 ;; \
	esac || exit 1; done

fuzz: setup  ## damage every kind of file that the library reads, and see what reading it does: that campaign of `make soak` alone
	@ML_FACTORY_TEST_PROFILE=campaign $(PY) -m pytest $(SPREAD) --timeout 36000 tests/contract/test_files.py $(ARGS)

test-xla: setup  ## every network and the loop on a real XLA compiler (its CPU client); 7 GB of packages the first time
	@$(has_python)
	@$(call environment,.venv-xla,locked/xla)
	@$(call environment,.venv-serve,locked/image)
	@PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest tests/xla -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lock:  ## the closures of development, XLA and the service's image, with hashes; ARGS="dev" for one, ARGS=--upgrade
	@$(call environment,.venv-tools,tools)
	@.venv-tools/bin/python .ci/lock.py $(ARGS)

browser: setup  ## a notebook in a real JupyterLab and a headless Chromium: curves that move, Stop, Run all
	@$(call environment,.venv-browser,browser)
	@.venv-browser/bin/python -m pytest tests/browser --confcutdir tests/browser -p no:cacheprovider $(ARGS)

lint: setup  ## ruff, its format, mypy on the public modules, and the notebooks' own linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m tests.notebook_lint

format: setup  ## let ruff mend what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

notebooks: setup  ## the notebooks: each alone, by papermill and nbval, killed and run again
	@$(PY) -m pytest $(SPREAD) -m notebooks $(ARGS)

bench:  ## benchmarks beside their peers: one JSON line a measurement, then tables; BENCH=pipeline for one, ARGS='--rows 500000'
	@$(has_python)
	@$(call environment,.venv-bench,locked/dev bench)
	@.venv-bench/bin/python -m benchmarks $$BENCH -- $(ARGS)

matrix:  ## the notebooks on other versions: Python 3.11 to 3.13, and what Colab has; ROWS=3.13-colab for one
	@sh .ci/matrix

colab:  ## the notebooks and one wheel for MyDrive/ml_factory, into dist/colab or COLAB=folder
	@$(has_python)
	@$(PYTHON) .ci/colab.py "$$COLAB"

badges: setup  ## OWNER=name: write the repository's owner into links, badges and bootstrap cells
	@test -n "$$OWNER" || { echo "make badges: say who: make badges OWNER=name" >&2; exit 2; }
	@$(PY) .ci/badges.py "$$OWNER"

clean:  ## remove environments and caches; never the workspace
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build *.egg-info
