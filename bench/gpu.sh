#!/usr/bin/env bash
# Checks and measures every kernel on one GPU in at most 8 minutes: bench/gpu.sh
# Without a GPU: bench/gpu.sh --dry-run. Results: gpu.csv and gpu.txt in $OUT, or in bench/results.
# Needs Python with torch and Triton (PYTHON, default python3); nothing is installed and no network is used. Peers are
# unpacked from pure-Python wheels in bench/wheels, where there are any.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
cd "$root"
export PYTHONPATH="$root:$root/kernels:$root/bench${PYTHONPATH:+:$PYTHONPATH}"
peers=$(mktemp -d)
trap 'rm -rf "$peers"' EXIT
for wheel in "$root"/bench/wheels/*.whl; do
    [ -e "$wheel" ] || continue
    "$python" -m zipfile -e "$wheel" "$peers" || echo "left out: $(basename "$wheel")"
done
export PYTHONPATH="$PYTHONPATH:$peers"
timeout 480 "$python" -m crest_bench.gpu "$@"
