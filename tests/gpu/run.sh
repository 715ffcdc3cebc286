#!/usr/bin/env bash
# Runs everything on a GPU machine, from the folder that `make gpu-bundle` packed: contract tests,
# examples, Python tests, benches. Needs Python with torch, cuda-bindings, pytest, pytest-timeout,
# transformers, timm and torch-geometric; no Rust, no network.
set -euo pipefail
cd "$(dirname "$0")"
export CGRAPH_REQUIRE_CUDA=1 PYTHONPATH="$PWD/site"
results=${1:-$PWD/results}

python3 -m pip install --quiet --no-index --no-deps --upgrade --target site ./*.whl
python3 -c "import cuda.bindings, pytest, pytest_timeout, torch"
status=0
# One thread: several tests open a global capture, which forbids calls in every thread.
./contract --include-ignored --test-threads=1 --quiet || status=1
for example in examples/*; do
  echo "== $example"
  case "$example" in
    *.py) python3 "$example" || status=1 ;;
    *) CGRAPH_DRIVER=cuda "$example" || status=1 ;;
  esac
done
# The package under test is the installed one, so pytest runs beside the tests and not in them.
# Another plugin warns of several processes, and warnings are errors.
pytest=(python3 -m pytest -q -p no:cacheprovider -p no:benchmark)
processes=()
if python3 -c "import xdist" 2> /dev/null; then
  processes=(--numprocesses auto --maxprocesses 14 --dist worksteal)
fi
"${pytest[@]}" "${processes[@]}" -m "not alone" tests || status=1
"${pytest[@]}" -m alone tests || status=1
for bench in replay random_replay loops small_captures callables graphed decode_calls segments piecewise pools import_time; do
  python3 "benches/$bench.py" --results "$results" || status=1
done
exit $status
