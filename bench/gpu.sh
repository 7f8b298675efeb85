#!/usr/bin/env bash
# Checks and measures every kernel on one GPU in at most 8 minutes: bench/gpu.sh
# Results: gpu.csv (appended to) and gpu.txt in $OUT, or in bench/results.
# Without a GPU: bench/gpu.sh --dry-run, which measures nothing and takes as long as it takes.
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
limit=480
case " $* " in *" --dry-run "*) limit=0 ;; esac # no limit: every stage has one of its own
timeout "$limit" "$python" -m crest_bench.gpu "$@"
