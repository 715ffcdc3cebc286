# One door for people and CI. `make demo` and `make test` need Rust and Python 3.10 or newer, and
# install the rest into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUNDLE := dist/bundle

.PHONY: demo test lint build docs bench gpu-bundle clean

demo: build
	$(BIN)/python -m cgraph demo

test: lint rust-test python-test docs

$(STAMP): requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --requirement requirements/dev.txt
	touch $@

build: $(STAMP)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --quiet --skip-install-deps

.PHONY: rust-test python-test
rust-test:
	cargo test --workspace --quiet
	cargo test --package cg-core --no-default-features --quiet
	for example in first_graph update hooks embed_cudarc; do \
		cargo run --quiet --package cg-core --example $$example || exit 1; done

python-test: build
	CGRAPH_DRIVER=sim $(BIN)/python -m pytest

lint: build
	cargo fmt --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo clippy --package cg-core --no-default-features --all-targets --quiet -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest cgraph._core --allowlist tests/typing/stubtest.txt

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --quiet

# Everything that a GPU machine with Python and torch needs: no Rust, no network. See docs/testing.md.
gpu-bundle: build
	rm -rf $(BUNDLE) && mkdir -p $(BUNDLE)
	$(BIN)/maturin build --release --quiet --out $(BUNDLE)
	bash tools/contract_binary.sh $(BUNDLE)/contract
	cargo build --release --quiet --package cg-bench
	cp target/release/cg-bench $(BUNDLE)/ && strip $(BUNDLE)/cg-bench $(BUNDLE)/contract
	cp -r tests benches/python pyproject.toml tools/run_on_gpu.sh $(BUNDLE)/
	du -sh $(BUNDLE)

clean:
	rm -rf target dist $(VENV)
