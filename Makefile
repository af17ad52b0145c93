# The whole project in two commands: `make tune` and `make test`. Both set `.venv` up first, once.

PYTHON ?= python3
WORKLOAD ?= audio
BIN := .venv/bin
SPEEDKIT ?= $(BIN)/speedkit
UV ?= $(shell command -v uv)

# What the two commands need, and the rest: extras of pyproject.toml.
EXTRAS := audio,image,tars,int8,notebooks,test
MORE := cluster,peers,docs

# A set-up is finished when its file is there, whose name changes with what is to be installed and where.
SUM := $(shell { pwd; cat requirements.lock pyproject.toml; } | cksum | cut -d' ' -f1)
STAMP := .venv/.installed-$(SUM)

# A value that holds a regular expression must reach speedkit as it was typed: $(value) keeps make from reading its `$`,
# the quotes keep the shell from reading the rest, and nothing passes it on through the environment.
unexport DATA LABEL_PATTERN TEST_PATTERN LABELS BUDGET OUT ARGS
quoted = '$(subst ','\'',$(value $(1)))'
option = $(if $(value $(1)),$(2) $(call quoted,$(1)))

# What a run or a test writes beside its results stays in the repository: a home that is read-only, or that holds
# settings of its own, changes nothing.
CACHE := $(CURDIR)/.cache
tune test test-all: export IPYTHONDIR := $(CACHE)/ipython
tune test test-all: export JUPYTER_CONFIG_DIR := $(CACHE)/jupyter/config
tune test test-all: export JUPYTER_DATA_DIR := $(CACHE)/jupyter/data
tune test test-all: export JUPYTER_RUNTIME_DIR := $(CACHE)/jupyter/runtime
tune test test-all: export MPLCONFIGDIR := $(CACHE)/matplotlib
tune test test-all: export NUMBA_CACHE_DIR := $(CACHE)/numba
tune test test-all: export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
tune test test-all: export TRITON_CACHE_DIR := $(CACHE)/triton
test test-all: export SPEEDKIT_CACHE_DIR := $(CACHE)/speedkit
test test-all: export OMP_NUM_THREADS := 1
tune test test-all: | .cache/ipython

.cache/ipython:  # IPython turns to a temporary folder when the one above its own is missing
	@mkdir -p $@

BENCHMARKS := $(filter-out %/common.py %/scripts.py,$(wildcard benchmarks/*.py))  # scripts.py takes checkouts
STORY := $(foreach number,00 01 12 21 90 99,$(wildcard notebooks/$(number)_*.ipynb))
# One file per process: its fixtures are made once, and a notebook has one kernel.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
SMOKE := SPEEDKIT_SCALE=smoke $(PYTEST) --nbval --nbval-current-env --nbval-cell-timeout 180

.PHONY: help setup setup-all setup-cluster setup-peers setup-docs tune test test-all bench lint lab site drawings lock system clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1\t\2/p' Makefile | expand -t 20
	@echo 'tune takes WORKLOAD=audio DATA=folder LABEL_PATTERN=regex TEST_PATTERN=regex LABELS=csv BUDGET=4m OUT=folder ARGS="..."'

setup: $(STAMP)  ## make or reuse .venv, with what tune and test need at its locked versions

setup-all: .venv/.installed-$(MORE)-$(SUM)  ## add what test-all and the benchmarks need: a Dask cluster, other libraries

setup-cluster setup-peers setup-docs: setup-%: .venv/.installed-%-$(SUM)

# Prints the interpreter itself, also when an environment of its own is active, if it is of use here.
fits = import sys, venv, ensurepip; (3, 11) <= sys.version_info[:2] <= (3, 14) or sys.exit(1); print(sys._base_executable)

# Without a PYTHON of the user's own, the first Python that fits is taken. An environment that is half made, or that was
# made in another folder, is made anew.
$(STAMP):
	@set -e; found=; \
	for python in $(if $(filter file,$(origin PYTHON)),$(PYTHON) python3.13 python3.12 python3.11 python3.14,"$(PYTHON)"); do \
	  found=$$("$$python" -c '$(fits)' 2>/dev/null) && break; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "set-up: needs Python 3.11 to 3.14 with its venv module (Debian, Ubuntu: apt-get install python3-venv);" \
	    "name one with PYTHON=/path/to/python" >&2; exit 2; \
	fi; \
	if ! $(BIN)/pip --version 2>/dev/null | grep -qF "$(CURDIR)/.venv/"; then \
	  echo "set-up: making .venv with $$("$$found" --version)"; rm -rf .venv; "$$found" -m venv .venv; \
	fi; \
	rm -f .venv/.installed-*; \
	echo "set-up: installing packages at their locked versions: 5.6 GB, about five minutes"; \
	if ! command -v nvidia-smi >/dev/null && ! ls -d .venv/lib/python3*/site-packages/torch 2>/dev/null | grep -q .; then \
	  echo "set-up: no NVIDIA GPU was found. Most of the size is CUDA, which PyTorch's CPU builds do without: see" \
	    "docs/install.md and https://pytorch.org/get-started/locally/"; \
	fi; \
	$(call install,$(EXTRAS))

.venv/.installed-%-$(SUM): $(STAMP)
	@set -e; echo "set-up: adding $*"; \
	$(call install,$*)

# The package with these extras, at the locked versions, which are pip's constraints: no more is installed than these
# extras need, and a torch that is there and fits, such as a CPU build, stays. A package whose installation was cut short
# (pip writes INSTALLER last) is forgotten, so that it is installed again. uv, where there is one, does the same in less
# time; where it fails, for it does not read pip's settings, pip goes on.
define install
for package in .venv/lib/python3*/site-packages/*.dist-info; do \
	  if [ ! -e "$$package/INSTALLER" ]; then rm -rf "$$package"; fi; \
	done; \
	uv="$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python"; \
	pip="$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input"; \
	locked() { \
	  $$1 -c requirements.lock hatchling editables && \
	  $$1 -c requirements.lock --no-build-isolation -e ".[$(1)]"; \
	}; \
	if [ -z "$(UV)" ] || ! locked "$$uv"; then \
	  locked "$$pip" || { echo "set-up: not finished; run make again to go on from here" >&2; exit 1; }; \
	fi; \
	touch $@; echo "set-up: done"
endef

tune: setup  ## try every optimization; the report, the notebook and the winning plan appear in runs/
	@$(SPEEDKIT) tune $(call quoted,WORKLOAD) \
	  --out $(if $(value OUT),$(call quoted,OUT),"runs/$$(date +%Y%m%d-%H%M%S)") \
	  $(call option,DATA,--data-dir) $(call option,LABELS,--labels) \
	  $(call option,LABEL_PATTERN,--label-pattern) $(call option,TEST_PATTERN,--test-pattern) \
	  $(call option,BUDGET,--budget) $(value ARGS)

test: lint  ## check the code, run the quick tests, then the six notebooks that carry the story in their smoke scale
	$(PYTEST) -m "not slow" $(ARGS)
	$(SMOKE) $(STORY)

test-all: test setup-all  ## all of that, then the long tests (faults, ranks, browser) and all other notebooks
	$(BIN)/python -m pytest -m slow tests/lessons $(ARGS)  # profiles: alone, not beside the attack's bursts of load
	$(PYTEST) -m slow --ignore=tests/lessons $(ARGS)
	$(SMOKE) $(filter-out $(STORY),$(wildcard notebooks/*.ipynb))

bench: setup  ## measure what speedkit itself costs, against its limits; takes a quiet machine
	@failed=0; for script in $(BENCHMARKS); do $(BIN)/python $$script $(ARGS) || failed=1; done; exit $$failed

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: setup  ## open a working copy of the notebooks, in lessons/, in JupyterLab
	$(SPEEDKIT) lab lessons -- $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

site: setup-docs  ## build the site of lessons, pages and reference in build/site, without a network
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/site $(ARGS)
	@echo "build/site/docs/index.html"

drawings: setup  ## make the PNG of each drawing of the lessons from its SVG; takes Chromium (make system)
	$(BIN)/python tools/drawings.py

lock:  ## choose all versions anew (needs uv, which is not part of the set-up)
	uv pip compile --universal --fork-strategy fewest --python-version 3.11 --all-extras pyproject.toml \
	  -o requirements.lock --no-header --no-annotate --upgrade

system:  ## install the system packages that some tests use (Debian, Ubuntu; as root)
	@bash tests/install_system.sh

clean:  ## remove caches; .venv and runs stay
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache
	find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
