# `make demo` and `make test` need Python 3.11 or newer, make and a package index; the rest follows.
PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(wildcard proto/fedsched/v1/*.proto)

.PHONY: demo test check format proto bench clean

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fedsched needs Python 3.11 or newer, and $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making .venv: some minutes and under 2.5 GB, most of it torch; only the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	@touch $@

demo: .venv/ready
	$(BIN)/fedsched demo

# Two processes: live tests start whole federations, and with more of them at once on two cores their deadlines come near.
test: .venv/ready
	$(BIN)/pytest -n 2 --dist loadgroup

bench: .venv/ready
	$(BIN)/fedsched bench core

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Ifedsched/pb=proto/fedsched/v1 \
	  --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	  $(patsubst proto/fedsched/v1/%,fedsched/pb/%,$(PROTOS))

clean:
	rm -rf .venv build dist *.egg-info
