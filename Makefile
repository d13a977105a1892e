# make demo       serve the bundled model with a cache rank, ask it a question, show what the cache rank did
# make test       run the tests: 8 to 22 minutes on 2 cores; ARGS="tests/kernels -q" is one pytest run of what it names
#                 TESTS="tests/integration" runs what it names as all are: in parallel
# make test-all   run the thorough tests too, and try more examples of each property
# make serve      serve; ARGS="..." takes any flag of SGLang and ours
# make lint       formatter, linter, type checker
# make soak       use servers for two minutes, disturb them and their cache ranks, check every answer; ARGS="--seconds 1800"
# make bench      host time per decode step, start-up, recall of the predictors, bytes on the wire by hysteresis
# make clean      remove what the others made
#
# SGLANG=0.5.16 after any of them takes that release of SGLang, in an environment of its own.

NEWEST_TESTED := 0.5.23
SGLANG ?= $(NEWEST_TESTED)
VENV ?= .venv$(if $(filter-out $(NEWEST_TESTED),$(SGLANG)),-$(SGLANG))
# The first interpreter of a supported version; a shim may exist for one that is not installed.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(SGLANG)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests that share a server are a group. conftest.py puts the longest groups first.
IN_PARALLEL := -n auto --dist loadgroup --no-loadscope-reorder
CHOSEN ?= not thorough
PROFILE ?= default

.PHONY: demo serve test test-all lint soak bench clean install

demo: install
	$(BIN)/python -m scripts.demo

serve: install
	$(BIN)/python -m sglang_ext.launch --cache-rank-gpus 1 $(ARGS)

test: install
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	$(PYTEST) $(IN_PARALLEL) --hypothesis-profile $(PROFILE) -m "$(CHOSEN)" $(TESTS)
endif

test-all:
	$(MAKE) test CHOSEN= PROFILE=thorough

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

soak: install
	$(BIN)/python -m scripts.soak $(ARGS)

bench: install
	$(BIN)/python -m scripts.measure_host_time
	$(BIN)/python -m scripts.compare_selection

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: needs Python 3.11 or 3.12; pass PYTHON=/path/to/it" >&2; exit 1; }
	@[ $$(df -Pk . | awk 'END {print int($$4 / 1e6)}') -ge 12 ] || { \
		echo "error: less than 12 GB are free here; pip needs 5 more in $${TMPDIR:-/tmp} meanwhile" >&2; exit 1; }
	@echo "Installing SGLang $(SGLANG) and this package into $(VENV): about 4 minutes and 11 GB the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[dev]' 'sglang==$(SGLANG)'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
