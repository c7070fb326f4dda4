# `make quickstart` and `make test` need make and Python 3.10 or newer; the rest is installed into $(VENV).
#
#   PYTHON=python3.12     the Python to make the environment with
#   VENV=path             where the environment is, or goes
#   TORCH_INDEX=url       where torch comes from; https://download.pytorch.org/whl/cpu has the small CPU build, which is
#                         all that a Linux machine without a GPU needs
#   ARGS="..."            more options for the quickstart
#   PYTEST_ARGS="..."     other options for pytest

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
PYTEST_ARGS ?= -n 2 -m "not exhaustive"

BIN := $(VENV)/bin
# Python compiles what is imported. To compile all 25,000 files, pip needs more time than for the rest.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=
PACKAGE_FILES := find src modeling data retrieval trainers evaluation hub_cards -type f -not -name '*.pyc' -not -name '.*'

.PHONY: quickstart test test-nightly lint style docs clean FORCE
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed-eval
	$(BIN)/revela-hub quickstart $(ARGS)

# mypy needs one core for half a minute or more: it runs during the tests, and its output is shown after theirs.
test: style
	@$(BIN)/mypy -p revela_hub >$(VENV)/.types 2>&1 & types=$$!; trap "kill $$types" INT; \
	$(BIN)/pytest $(PYTEST_ARGS); tests=$$?; \
	wait $$types || { cat $(VENV)/.types; exit 1; }; exit $$tests

# All exhaustive cases, and killed runs. CI runs a sample of them.
test-nightly: $(VENV)/.installed-dev
	$(BIN)/pytest $(PYTEST_ARGS) -m exhaustive
	$(BIN)/python tests/nightly.py

lint: style
	$(BIN)/mypy -p revela_hub

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The documentation site as HTML, and each page as Markdown next to it with llms.txt.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -b markdown -d build/docs/.doctrees docs build/docs

# The environment goes with `rm -r .venv`; without its build folder the installed package is not there either.
clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f $(VENV)/.installed-*

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); name a Python 3.10 or newer: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), but 3.10 or newer is needed: make PYTHON=..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --upgrade pip setuptools
	@touch $@

# Before the rest, so that nothing else decides which build of it comes from where.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	@echo "Installing torch (by far the largest part)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# Changes when a file comes or goes: the strict editable installation links files one by one.
$(VENV)/.files: FORCE | $(VENV)/.created
	@$(PACKAGE_FILES) | sort > $@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Strict, so that type checkers see the package. The stem is the extra.
$(VENV)/.installed-%: $(VENV)/.torch $(VENV)/.files pyproject.toml setup.py
	@echo "Installing revela-hub[$*]"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[$*]' --config-settings editable_mode=strict
	@touch $@
