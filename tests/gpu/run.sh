#!/usr/bin/env bash
# Runs everything on a GPU machine, from the folder that `make gpu-bundle` packed: contract tests,
# Python tests, benches. Needs Python with torch and pytest; no Rust, no network.
set -euo pipefail
cd "$(dirname "$0")"
export CGRAPH_REQUIRE_CUDA=1 PYTHONPATH="$PWD/site"
results=${1:-$PWD/results.md}

python3 -m pip install --quiet --no-index --no-deps --upgrade --target site ./*.whl
status=0
# One thread: several tests open a global capture, which forbids calls in every thread.
./contract --include-ignored --test-threads=1 --quiet || status=1
# The package under test is the installed one, so pytest runs beside the tests and not in them.
python3 -m pytest -q -p no:cacheprovider tests || status=1
python3 benches/replay.py --markdown "$results" || status=1
exit $status
