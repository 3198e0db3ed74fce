# `make test` is all that a fresh machine needs: Python 3.11 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install check test slow bench figures clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,torch,train]'
	touch $@

install: $(INSTALLED)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest --numprocesses 2

slow: $(INSTALLED)
	$(BIN)/pytest --numprocesses 2 -m slow

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/limit.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/simgrid_compare.py
	$(BIN)/python benchmarks/trees.py

figures: $(INSTALLED)
	$(BIN)/meshmend figures -o figures

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis figures
