# The commands of the README. `make help` lists them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell sed -n 's/^torch==.*/&/p' constraints.txt)

DATA := data/quickstart
RUN := runs/tiny
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test check torture bench docs clean

help:  ## lists these commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1 - \2/p' $(MAKEFILE_LIST)

setup: $(READY)  ## makes .venv with the tested versions of everything

# torch comes first and alone, so that nothing else on the list can bring another build of it.
$(READY): constraints.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(READY) $(DATA)/train/manifest.json  ## trains a first OLMo-2 on this machine, in minutes
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml train_hf.py configs/tiny/cpu.yaml
	$(BIN)/python examples/sample.py $(RUN)/latest
	$(BIN)/olmo-hf report $(RUN)
	@printf '%s\n' '' \
	  'Everything is in $(RUN):' \
	  '  latest/        the newest checkpoint: a model that stock transformers loads' \
	  '  loss.png       the curves          report.html   the same and more, in a browser' \
	  '  metrics.jsonl  one line per step   config.yaml   every setting of the run' \
	  'The prepared text is in $(DATA).' '' \
	  'Try next:' \
	  '  source $(BIN)/activate' \
	  '  python examples/sample.py $(RUN)/latest --prompt "class Queue:"' \
	  '  accelerate launch --config_file accelerate_configs/cpu.yaml train_hf.py configs/tiny/cpu.yaml --training.max_duration=600 --name=longer' \
	  '  accelerate launch --config_file accelerate_configs/cpu_ddp.yaml train_hf.py configs/tiny/cpu.yaml --name=two'

# Real text without a download: the source files of Python's standard library, one document each.
$(DATA)/train/manifest.json: | $(READY)
	$(BIN)/olmo-hf prepare-data \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
	  --pattern '*.py' --exclude site-packages --exclude lib2to3 \
	  --train-tokenizer 4096 --output $(DATA)

test: $(READY)  ## runs all tests but the slow ones
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)  ## formatting, lint, types and the rules of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house

torture: $(READY)  ## runs the slow tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

bench: $(READY)  ## measures what is claimed about speed and memory
	@for script in benchmarks/*.py; do test -e "$$script" || continue; echo "$$script"; $(BIN)/python "$$script" || exit 1; done

docs: $(READY)  ## writes the generated pages of docs/ and the tree in the README anew
	$(BIN)/python docs/generate.py

clean:  ## removes caches and built packages; data, runs and .venv stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
