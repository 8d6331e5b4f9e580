# make demo    train a small model with 4 workers and a coordinator, all on this machine
# make demo-scale  the same with PostgreSQL, a bucket, two coordinators and two aggregators. The leader and an aggregator are
#              killed midway, and the final model must be that of `make demo`, bit for bit
# make test    the quick tests of every part, on all CPUs, in minutes: while you work
# make check   what must hold before a change is merged, and what `.ci/run` runs in a clean clone: format, lint, types,
#              `make test`, whole systems (marked `system`: kills at every fourth crash point, several processes) and 76 seeds
#              of the simulation. `make --jobs=2 check` runs two of its parts side by side. The parts are `systems`, `kills`,
#              `simulated`, `test`, `types` and `lint`
# make nightly    `make check` and what takes longer (marked `slow`, most of a second and more, or `nightly`): images,
#              installations, the tutorial, the demo at scale, planted bugs, 1000 more seeds, a soak, benchmarks in short,
#              and `make test slow` with blobs in memory, with PostgreSQL, through a standby, and with an aggregator
# make simulate    SEEDS=100000 simulated runs under faults, on all CPUs, with the invariants checked after every step
# make soak    a coordinator and 6 workers under kills, slow lines and flipped bits, for MINUTES=15; as root, or without slow lines
# make gpu     what needs a GPU, in parts that are not run again once they have passed; it fetches nothing. GPU_WHEELS=DIR has
#              wheels of packages that the Python lacks; that is the one of $(VENV) if it is there, else PYTHON
# make screenshots    docs/pictures, of the dashboard while the demo runs; needs Chromium and takes a few minutes
# make dist    what is released, for this platform: sdist and wheel, in dist/ (docs/releasing.md has the other platforms)
# make docs    the site of docs/, in site/; a link that leads nowhere ends it
# make clean   remove what these made
#
# PYTHON=python3.12 chooses the interpreter; it must be 3.11 or newer.

# Some images set it so that Python keeps no compiled modules. Each process of the tests would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile pip would compile all of torch, transformers and others, which takes as long as the rest: Python
# compiles what it imports.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo demo-scale test check slow systems kills simulated nightly lint types simulate soak gpu screenshots docs dist clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/outerstep demo

demo-scale: $(VENV)/installed-dev
	$(BIN)/python -m harness.demo_scale

# Tests wait about as long as they compute, so there is one process more than CPUs. Each runs whole files, whose tests share
# a coordinator.
PROCESSES := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder --durations=15

test: $(VENV)/installed-dev
	$(PYTEST) -m "not slow and not system and not nightly"

check: systems kills simulated test types lint

slow: $(VENV)/installed-dev
	$(PYTEST) -m "slow and not system and not nightly"

# Whole systems start several processes each, and some measure memory or hold ports: one after the other.
SYSTEMS := $(BIN)/python -m pytest -m "system and not nightly" --durations=15
systems: $(VENV)/installed-dev
	$(SYSTEMS) --ignore=tests/simulation --ignore-glob='tests/test_*crash_points.py'

kills: $(VENV)/installed-dev
	$(SYSTEMS) tests/test_*crash_points.py

simulated: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "system and not nightly" tests/simulation

NIGHTLY_SEEDS ?= 1000
# Tests of requests, not of one server's limits and settings.
THROUGH_A_STANDBY := $(addprefix tests/coordinator/test_,$(addsuffix .py,audit carrying crowd dashboard deadlines deltas \
	events evaluating join_tokens late long_polls members membership methods names operator quarantine rolling_back \
	seeding steering tokens transfers units verdicts weights))
# Tests of what is done with contributions, not of the coordinator's own files.
WITH_AN_AGGREGATOR := $(addprefix tests/coordinator/test_,$(addsuffix .py,carrying deltas epochs equal_work evaluating \
	guarding late private quarantine residuals rolling_back short_rounds steering verdicts weights))
nightly: check slow
	$(BIN)/python -m pytest -m nightly --durations=30
	$(PYTEST) -m "not system and not nightly" --blobs=memory
	$(PYTEST) -m "not system and not nightly" --blobs=memory --database=postgresql tests/coordinator
	$(PYTEST) -m "not system and not nightly" --blobs=memory --database=postgresql --standby $(THROUGH_A_STANDBY)
	$(PYTEST) -m "not system and not nightly" --blobs=memory --database=postgresql --aggregator $(WITH_AN_AGGREGATOR)
	$(BIN)/python -m tests.simulation --first $$(date +%s) --seeds $(NIGHTLY_SEEDS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive protocol coordinator worker outerstep migrations setup.py

types: $(VENV)/installed-dev
	$(BIN)/mypy

SEEDS ?= 100000
simulate: $(VENV)/installed-dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

MINUTES ?= 15
soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu $(if $(GPU_WHEELS),--wheels "$(GPU_WHEELS)")

screenshots: $(VENV)/installed-dev
	$(BIN)/python -m docs.write_pictures

dist: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python .ci/dist.py dist

# The variable: its builder is kept until May 2027, of which it would tell each time (docs/log.md).
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info protocol/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Outerstep needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
		echo "Install one and name it: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The editable install points at this directory, so only new requirements and the compiled kernels make these run again.
SETUP := pyproject.toml setup.py constraints.txt protocol/kernels.c

$(VENV)/installed: $(VENV)/created $(SETUP)
	@echo "Installing into $(VENV); torch is large, so the first time takes a while"
	$(INSTALL) -e '.[coordinator,worker]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/created $(SETUP)
	@echo "Installing into $(VENV); torch is large, so the first time takes a while"
	$(INSTALL) -e '.[coordinator,worker,dev]'
	@touch $@ $(VENV)/installed
