# Everything a checkout can do; `make help` lists it. Needs make, a POSIX shell and Python 3.11 or newer.
.POSIX:
.PHONY: help install install-docs demo test test-all lint format snapshot bench gpu bench-tables same-bits quality docs docs-serve wheel release clean distclean

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
# Two more than the two cores: tests wait for servers, processes and each other's compilers.
JOBS ?= 4
SETUP = PYTHON='$(PYTHON)' VENV='$(VENV)' sh .ci/install
# Worker processes share the cores, so each of them computes on one thread. Each takes a run of neighbouring tests, and
# part of another's when it has none left, so that what the tests of a file share is made once. Hundreds of processes are
# started: each would compile every module where the environment forbids to keep bytecode.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

help:
	@echo 'make demo         install, then generate, clean, train, evaluate, export and predict; ends with a report; minutes'
	@echo 'make test         install, then ruff, mypy and every test but the slow ones'
	@echo 'make test-all     the same with the slow tests'
	@echo 'make lint         ruff and mypy alone'
	@echo 'make format       let ruff rewrite the sources'
	@echo 'make snapshot     accept a change of the public names, flags and settings'
	@echo 'make bench        run every benchmark and append to benchmarks/results/ (SMALL=1 for a quick try)'
	@echo 'make gpu          on a machine with GPUs: every test and benchmark that needs one'
	@echo 'make bench-tables rewrite the tables of figures in README.md and docs/ from benchmarks/results/'
	@echo 'make same-bits    train in two revisions and compare every bit: make same-bits BASE=REVISION'
	@echo 'make quality      train the reference models on real data and record their AUC'
	@echo 'make docs         build the documentation into site/'
	@echo 'make docs-serve   show it in a browser'
	@echo 'make wheel        build the wheel into dist/'
	@echo 'make release      test, check version and changelog, build the wheel and tag it'
	@echo 'make clean        remove what the targets above wrote'
	@echo 'make distclean    the same, and .venv'
	@echo 'PYTHON=python3.12 make test     another interpreter;   JOBS=8 make test     more test processes'

install:
	@$(SETUP) etl,tracking,dev

install-docs:
	@$(SETUP) etl,tracking,dev,docs

demo: install
	@$(BIN)/python examples/demo.py --folder demo

lint: install
	@echo '== ruff: style and order of imports'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo '== mypy: types'
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: lint
	@echo '== pytest: all but the slow tests, docstring examples and documentation included'
	@$(PYTEST) -m 'not slow' src tests

test-all: lint
	@echo '== pytest: everything'
	@$(PYTEST) src tests

snapshot: install
	@VIVIANE_ACCEPT_SNAPSHOT=1 $(BIN)/python -m pytest tests/house/test_snapshot.py

bench: install
	@$(BIN)/python benchmarks/run.py $${SMALL:+--small}

gpu: install
	@$(BIN)/python benchmarks/on_gpus.py

bench-tables: install
	@$(BIN)/python benchmarks/tables.py

same-bits: install
	@$(BIN)/python benchmarks/same_bits.py --base $${BASE:?name a revision: make same-bits BASE=REVISION}

quality: install
	@$(BIN)/python benchmarks/quality/run.py

docs: install-docs
	@$(BIN)/python benchmarks/tables.py
	@$(BIN)/mkdocs build --strict

docs-serve: install-docs
	@$(BIN)/mkdocs serve

wheel: install
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

release: test
	@$(BIN)/python .ci/release.py

clean:
	@echo 'removing build, dist, site, demo, runs and tool caches'
	@rm -rf build dist site demo runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@echo 'removing $(VENV)'
	@rm -rf '$(VENV)'
