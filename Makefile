PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Most of the suite's time is waiting for processes: two files at once halve it on two cores.
# Files come in the order of tests/conftest.py, which mixes those that wait with those that compute.
SUITE := $(PYTEST) -m "not gpu and not soak" -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo demo-autoscale test check lint types imports stubs rooms fields soak clean

$(VENV)/.run: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pdserve into $(VENV) (torch is the long part) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pdserve and what its tests and checks need into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.run $@

demo: $(VENV)/.run
	@$(BIN)/pdserve demo

demo-autoscale: $(VENV)/.run
	@$(BIN)/pdserve demo-autoscale

test: $(VENV)/.dev
	@$(SUITE)

check: $(VENV)/.dev lint types imports
	@$(BIN)/python scripts/generate_stubs.py --check
	@$(BIN)/python scripts/list_rooms.py --check
	@PYTHONPATH=. $(BIN)/python scripts/list_fields.py --check
	@$(SUITE)

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/.dev
	@$(BIN)/mypy

imports: $(VENV)/.dev
	@$(BIN)/lint-imports

stubs: $(VENV)/.dev
	@$(BIN)/python scripts/generate_stubs.py

fields: $(VENV)/.dev
	@PYTHONPATH=. $(BIN)/python scripts/list_fields.py

rooms: $(VENV)/.dev
	@$(BIN)/python scripts/list_rooms.py

soak: $(VENV)/.dev
	@$(PYTEST) -m soak

clean:
	@rm -rf $(VENV) dist build
