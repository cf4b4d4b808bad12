# `make serve` and `make test` work on a machine with nothing but Python 3.11 or newer and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: serve test test-all check format lock clean

serve: .venv/installed
	$(BIN)/stepweave serve

test: check
	$(BIN)/pytest -n 2 --dist loadfile

# Every family in every kind of company, and all families through the whole stack; `test` runs a fixed part of these.
test-all: check
	$(BIN)/pytest -n 2 --dist loadfile --all

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins every package, direct or not, for all extras. CPU and GPU builds of torch share a version, so the build is left
# to whoever installs (README, "Installing").
lock: .venv/installed-dev
	$(BIN)/pip-compile --quiet --extra worker --extra train --extra bench --extra dev --strip-extras \
	    --no-header --no-annotate --upgrade --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options -o requirements.lock pyproject.toml
	sed -i -e 's/+cpu$$//' -e '/^#/d' -e '/^$$/d' requirements.lock

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/installed: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stepweave needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[worker]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[worker,train,bench,dev]'
	touch $@
