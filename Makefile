# Everything runs in .venv, which is made on first use and filled from pyproject.toml under constraints.txt.

PYTHON ?= python3
ARGS ?=
CHROMIUM ?= chromium

venv := .venv
python := $(venv)/bin/python
install := $(python) -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable

# Which tests are run with the oldest packages: what reads configurations and command lines, and one launch on actors.
lowest := .venv-lowest
slice := -n 2 --dist loadfile tests/schedules tests/raypar/config/test_config.py tests/raypar/cli/test_cli.py \
	tests/raypar/cli/test_all_mistakes.py tests/raypar/job/test_job.py
versions_of = '$(1)/bin/python' -c 'import importlib.metadata as m, platform; print("Python", platform.python_version(), \
	*(f"{name} {m.version(name)}" for name in ("torch", "ray", "pydantic", "tyro", "numpy")), sep=", ")'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install train test test-browser test-long test-lowest test-newest bench docs pictures wheel lint types clean versions of-another-python

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile
	@echo 'Variables: ARGS="..." for raypar train (make train), pytest (make test) or the bench, CHROMIUM for pictures,'
	@echo 'PYTHON=python3.12 for the Python of .venv, which is made anew if it has another one'

install: $(venv)/.installed ## fill .venv, so that .venv/bin/raypar and .venv/bin/python are there
	@echo 'raypar is in $(venv). Next: make train, or $(venv)/bin/raypar --help, or source $(venv)/bin/activate'

train: $(venv)/.installed ## train the small GPT on this machine; it leaves a folder below runs/
	@$(venv)/bin/raypar train gpt-small $(ARGS)

test: versions lint ## lint, then the tests, in two processes
	@PYTHONDONTWRITEBYTECODE= $(python) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) # each of its processes compiles none anew

test-browser: docs $(venv)/.installed-dev ## pages, opened in Chromium at three widths, light and dark, and the notebook, executed
	@RAYPAR_SITE=build/site $(python) -m pytest -m '' tests/browser tests/raypar/test_tour.py $(ARGS)

test-long: $(venv)/.installed-long ## what is too long for every change: fuzzed schedules, runs and layouts, damage, kills
	@echo '== the tests marked long, and the random ones with more examples'
	@$(python) -m pytest -n 2 --dist loadfile -m 'long or hypothesis' --hypothesis-profile long
	@for script in schedule_fuzz schedule_matrix config_fuzz layout_fuzz expert_fuzz zero_matrix half_precision overflows memory_peaks \
			asynchronous_loss checkpoint_damage group_kills recovery_kills aimed_kills recovery_points elastic preemption driver_kills leaks two_hosts node_sums \
			on_premise relayouts hugging_face config_keys tiny_models feature_pairs feature_runs verify_own_models wrong_runs given_back job_stops neighbours; do \
		echo "== $$script" && $(python) -m tests.long.$$script || exit 1; done

test-lowest: $(lowest)/.installed ## a slice of the tests with the oldest packages that pyproject.toml allows, in .venv-lowest
	@$(call versions_of,$(lowest))
	@PYTHONDONTWRITEBYTECODE= $(lowest)/bin/python -m pytest $(or $(ARGS),$(slice))

test-newest: ## what needs no torch, on the newest Python that starts here, if it is newer than that of .venv
	@tests/newest.sh '$(or $(wildcard $(python)),$(PYTHON))'

docs: $(venv)/.installed-docs ## the documentation as a site, in build/site; a dead link fails
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

pictures: $(venv)/.installed ## draw the pictures of README.md and docs/ anew; without chromium, all but docs/report.png
	@$(venv)/bin/raypar draw 1f1b --ranks 4 --microbatches 8 --out docs/1f1b.svg
	@$(python) -m tests.support.pictures terminal
	@rm -rf build/pictures
	@$(python) -c '$(measured)'
	@$(venv)/bin/raypar report build/pictures/first-run
	@if command -v '$(CHROMIUM)' >/dev/null; then \
		'$(CHROMIUM)' --headless --no-sandbox --hide-scrollbars --window-size=1120,1500 --screenshot=docs/report.png \
			'file://$(CURDIR)/build/pictures/first-run/report.html' 2>/dev/null; \
	else echo 'docs/report.png was left out: $(CHROMIUM) is not here; install it, or give make pictures CHROMIUM=/path/to/it'; fi

bench: $(venv)/.installed-bench ## raypar beside its peers, in half an hour; ARGS=--quick for some
	@$(python) -m tests.bench $(ARGS)

wheel: $(venv)/.installed-dev ## the package as one file, dist/raypar-*.whl
	@$(python) -m build --wheel --no-isolation --outdir dist . >/dev/null
	@ls dist/*.whl

lint: $(venv)/.installed-dev ## ruff: rules and format
	@$(python) -m ruff check --quiet
	@$(python) -m ruff format --check --quiet

types: $(venv)/.installed-dev ## mypy, strict
	@$(python) -m mypy --no-error-summary -p raypar

clean: ## remove caches and build outputs; .venv and runs/ stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

versions: $(venv)/.installed-dev
	@$(call versions_of,$(venv))

# The stamps: an install is done again only when one of the two files has changed. One that was broken off leaves packages
# in halves, which pip can't read: then .venv is made anew.
define fill
	@test ! -e $(venv)/.filling || \
		{ echo 'The last install was broken off: $(venv) is made anew.' && '$(PYTHON)' -m venv --clear $(venv); }
	@touch $(venv)/.filling
	@$(install) '$(1)'
	@rm $(venv)/.filling
	@touch $(2)
endef

# The run that the pictures of measured steps are of.
measured := from dataclasses import replace; import raypar as rp; \
	run = replace(rp.recipe("gpt-small"), steps=40, eval_every=10, folder="build/pictures/first-run"); \
	job = rp.launch(run); job.train(); job.evaluate(); job.overlay().save("docs/overlay.svg"); job.close()

with_dev := .[dev,hf]
with_long := .[dev,hf,transformers]
with_bench := .[dev,hf,bench]
with_docs := .[docs]

# The Python of .venv is gone, as after an upgrade of the system, or PYTHON was given and .venv has another one: then
# everything in it is made anew.
version_of = $(shell '$(1)' -c 'import platform; print(platform.python_version())' 2>/dev/null)
has :=
ifneq ($(wildcard $(venv)/bin/pip),)
ifeq ($(realpath $(python)),)
has := a Python that is gone
else ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
ifneq ($(call version_of,$(PYTHON)),$(call version_of,$(python)))
has := Python $(call version_of,$(python))
endif
endif
endif
ifneq ($(has),)
$(venv)/bin/pip $(addprefix $(venv)/.installed,-dev -long -bench -docs) $(venv)/.installed: of-another-python
endif

of-another-python:
	$(usable)
	@echo '$(venv) has $(has): it is made anew with $(call version_of,$(PYTHON)).'

$(venv)/.installed: pyproject.toml constraints.txt | $(venv)/bin/pip
	@echo 'Installing raypar into $(venv); the first time this takes a few minutes.'
	$(call fill,.,$@)

$(venv)/.installed-dev: pyproject.toml constraints.txt | $(venv)/bin/pip
	@echo 'Installing raypar and its test tools into $(venv); the first time this takes a few minutes.'
	$(call fill,$(with_dev),$(venv)/.installed $@)

$(venv)/.installed-long: pyproject.toml constraints.txt | $(venv)/bin/pip
	@echo 'Installing raypar, its test tools and transformers into $(venv); the first time this takes a few minutes.'
	$(call fill,$(with_long),$(venv)/.installed $(venv)/.installed-dev $@)

$(venv)/.installed-bench: pyproject.toml constraints.txt | $(venv)/bin/pip
	@echo 'Installing raypar and what its bench compares it with into $(venv); the first time this takes a few minutes.'
	$(call fill,$(with_bench),$(venv)/.installed $(venv)/.installed-dev $@)

$(venv)/.installed-docs: pyproject.toml constraints.txt | $(venv)/bin/pip
	@echo 'Installing raypar and what makes its documentation into $(venv); the first time this takes a few minutes.'
	$(call fill,$(with_docs),$(venv)/.installed $@)

$(lowest)/.installed: pyproject.toml constraints.txt tests/support/lowest.py
	$(usable)
	@echo 'Installing the oldest packages that pyproject.toml allows into $(lowest); this takes a few minutes.'
	@'$(PYTHON)' -m venv --clear $(lowest)
	@$(lowest)/bin/python -m tests.support.lowest >$(lowest)/lowest.txt
	@$(lowest)/bin/python -m pip install -qq --disable-pip-version-check --constraint $(lowest)/lowest.txt --editable '$(with_dev)'
	@touch $@

# pip is the last thing that venv writes: where it is there, the environment is whole.
$(venv)/bin/pip:
	$(usable)
	@'$(PYTHON)' -m venv --clear $(venv)

define usable
	@command -v '$(PYTHON)' >/dev/null || \
		{ echo 'raypar needs Python 3.11 or newer, and $(PYTHON) is not here: make PYTHON=/path/to/python' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"raypar needs Python 3.11 or newer, \
	and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo '$(PYTHON) has no venv module: on Debian and Ubuntu, apt install python3-venv' >&2; exit 1; }
endef
