# One door for people and CI. `make demo` and `make test` need Rust 1.88 and Python 3.11 or newer, and
# install the rest into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUNDLE := dist/bundle
EXAMPLES := first_graph update hooks embed_cudarc
KERNELS := crates/cg-core/src/transfer/inputs crates/cg-core/src/transfer/outputs crates/cg-core/src/looped/loop crates/cg-core/tests/contract/kernels

.PHONY: demo test lint build package ptx docs deny miri gpu-bundle clean

demo: build
	$(BIN)/python -m examples.demo

test: lint rust-test python-test docs

$(STAMP): requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --requirement requirements/dev.txt
	touch $@

# Pin what is installed here, without the package itself.
.PHONY: lock
lock: $(STAMP)
	{ head -1 requirements/dev.txt; $(BIN)/python -m pip freeze --all --exclude-editable \
		--exclude pip --exclude cgraph-torch --exclude ziglang; } > target/dev.txt
	mv target/dev.txt requirements/dev.txt

build: $(STAMP)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --quiet > /dev/null

.PHONY: rust-test python-test
rust-test:
	cargo test --workspace --quiet
	cargo test --package cg-core --no-default-features --quiet
	for example in $(EXAMPLES); do \
		cargo run --quiet --package cg-core --example $$example || exit 1; done

# A test that holds the interpreter for ever ends its process, with a stack: no other limit reaches it.
python-test: build
	CGRAPH_DRIVER=sim OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		--numprocesses auto --maxprocesses 4 --dist worksteal --durations 10 \
		-o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

lint: build check-ptx
	cargo fmt --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo clippy --package cg-core --no-default-features --all-targets --quiet -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/signatures.py
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python -m mypy.stubtest cgraph._core --allowlist tests/typing/stubtest.txt

# The PTX that is checked in beside its source. The compiler's wheel lies beside torch's CUDA.
nvcc = $(wildcard $(abspath $(VENV))/lib/python3*/site-packages/nvidia/cu13/bin/nvcc) -ptx -arch=compute_75

ptx: $(STAMP)
	for one in $(KERNELS); do $(nvcc) -o $$one.ptx $$one.cu || exit 1; done

.PHONY: check-ptx
check-ptx: $(STAMP)
	mkdir -p target
	for one in $(KERNELS); do \
		$(nvcc) -o target/made.ptx $$one.cu || exit 1; \
		cmp target/made.ptx $$one.ptx || { echo "$$one.cu has changed: make ptx"; exit 1; }; done

docs: $(STAMP)
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --quiet
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# What is published: a wheel for glibc 2.28 or newer, the sources, the crate. Zig links against an old glibc.
package: build
	$(BIN)/python -m pip install --quiet --requirement requirements/package.txt
	rm -rf dist/package
	PATH=$(abspath $(BIN)):$$PATH CARGO_TARGET_DIR=target/package $(BIN)/maturin build --release --quiet \
		--zig --compatibility manylinux_2_28 --out dist/package
	$(BIN)/maturin sdist --out dist/package
	cargo publish --package cg-core --dry-run --allow-dirty --quiet
	ls dist/package

deny:
	cargo deny check bans licenses sources

# The reads of fields of torch's objects, on a double of these. Needs Miri of a nightly toolchain.
miri:
	MIRIFLAGS=-Zmiri-permissive-provenance cargo +nightly miri test --package cg-py --lib fields

# Everything that a GPU machine with Python and torch needs: no Rust, no network. See docs/testing.md.
gpu-bundle: build
	rm -rf $(BUNDLE) && mkdir -p $(BUNDLE)
	$(BIN)/maturin build --release --quiet --out $(BUNDLE)
	cargo build --release --quiet --package cg-bench
	cargo test --release --quiet --no-run --package cg-core --test contract --message-format json \
		| $(PYTHON) -c 'import json, shutil, sys; \
		[shutil.copy(path, "$(BUNDLE)/contract") for path in \
		(json.loads(line).get("executable") for line in sys.stdin) if path]'
	cargo build --release --quiet --package cg-core --examples
	mkdir -p $(BUNDLE)/examples
	for example in $(EXAMPLES); do \
		cp target/release/examples/$$example $(BUNDLE)/examples/ || exit 1; done
	cp -r tests pyproject.toml $(BUNDLE)/ && cp -r benches/python $(BUNDLE)/benches
	cp target/release/libcg_bench.so $(BUNDLE)/benches/
	strip $(BUNDLE)/examples/* $(BUNDLE)/contract $(BUNDLE)/benches/libcg_bench.so
	cp -r examples/*.py examples/demo $(BUNDLE)/examples/ && cp tests/gpu/run.sh $(BUNDLE)/
	find $(BUNDLE) -name __pycache__ -prune -exec rm -r {} +
	du -sh $(BUNDLE)

clean:
	rm -rf target dist $(VENV)
