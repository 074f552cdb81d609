#!/bin/bash
# One of three commands of ten minutes on a borrowed GPU machine. Each may be cut anywhere; the next goes on:
#
#     bash benchmarks/gpu/timed.sh [FLAGS OF benchmarks gpu]
#
# OUT: folder of the results, written after every row. KEEP: a folder of that machine that outlives a command,
# with installed wheels, compiled kernels, models, and the results again. Where the machine did not stay, results
# of before are taken up from WHEELS (.whl), the folder that wheels.sh filled. LIMIT: seconds, 570 by default.
# PYTHON: the interpreter with torch. QUICK=1 rehearses it on any machine.
set -u
python=${PYTHON:-python3} wheels=${WHEELS:-.whl} keep=${KEEP:-$HOME/.isobatch-gpu}
out=${OUT:-$keep/out} end=$((SECONDS + ${LIMIT:-570}))
mkdir -p "$keep/results" "$out"
cp -n "$wheels"/gpu-*.json "$keep/results/" 2>/dev/null
cp "$keep"/results/gpu-*.json "$out/" 2>/dev/null
if [ ! -d "$keep/site" ] && ls "$wheels"/*.whl >/dev/null 2>&1; then
    rm -rf "$keep/site.new"
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$keep/site.new" \
        "$wheels"/*.whl && mv "$keep/site.new" "$keep/site" || exit 3
fi
export PYTHONPATH=$keep/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 ISOBATCH_BENCHMARK_FOLDER=$keep/work
export TORCHINDUCTOR_CACHE_DIR=$keep/inductor TRITON_CACHE_DIR=$keep/triton
mkdir -p "$keep/work"

save() { cp "$out"/gpu-*.json "$keep/results/" 2>/dev/null; true; }
(while sleep 5; do save; done) &
saver=$!
trap 'save; kill $saver 2>/dev/null' EXIT
left=$((end - SECONDS))
timeout -k 10 "$left" "$python" -m benchmarks gpu --out "$out" --seconds $((left - 15)) ${QUICK:+--quick} "$@" 2>&1 |
    tee -a "$out/said.txt"
exit "${PIPESTATUS[0]}"
