# make demo: from nothing to a trained agent and a table. make test: from nothing to passed tests.
PYTHON ?= python3
VENV := .venv
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-worlds lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/sorl demo

test: $(VENV)/.dev
	$(VENV)/bin/pytest -q

# Worlds whose extras take minutes to compile, or much room.
test-worlds: $(VENV)/.worlds
	$(VENV)/bin/pytest -q tests/rollout/test_alfworld.py tests/rollout/test_multiple_choice.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# A stamp a set of extras: nothing is installed again while pyproject.toml and constraints.txt stay as they are.
$(VENV)/.demo: EXTRAS := textworld
$(VENV)/.dev: EXTRAS := textworld,webshop,scienceworld,dev
$(VENV)/.worlds: EXTRAS := textworld,webshop,scienceworld,alfworld,hpo,dev
$(VENV)/.demo $(VENV)/.dev $(VENV)/.worlds: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) runs
