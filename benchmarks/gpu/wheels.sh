#!/bin/sh
# Wheels of what a borrowed GPU machine lacks, for one that reaches no package index. From the project's root:
#
#     sh benchmarks/gpu/wheels.sh [FOLDER]       # .whl, which git ignores
#
# Versions are those of requirements.lock. TARGET: the Python there, 3.12 by default; CUDA: its CUDA, 13;
# PYTHON: an interpreter with pip, the project's. Then copy the tree and the folder there: benchmarks/gpu/timed.sh.
set -eu
test -f requirements.lock || { echo "run this from the project's root" >&2; exit 2; }
into=${1:-.whl} target=${TARGET:-3.12} cuda=${CUDA:-13}
python=${PYTHON:-$(ls .venv/bin/python 2>/dev/null || echo python3)}
mkdir -p "$into"
rm -f "$into"/*.whl

pinned() { # NAME -> NAME==VERSION of the lock
    grep -iE "^$1==" requirements.lock | sed -E 's/[[:space:];\\].*//' | grep . ||
        { echo "requirements.lock does not name $1" >&2; exit 1; }
}

# The command line: fire. Data from the hub: datasets. DeepSpeed's needs: hjson, msgpack, pydantic.
specs=""
for name in fire termcolor datasets dill multiprocess hjson msgpack pydantic pydantic_core annotated-types \
    typing-inspection bitsandbytes; do
    found=$(pinned "$name")
    specs="$specs $found"
done
# shellcheck disable=SC2086  # words
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$target" --implementation cp \
    --abi "cp$(echo "$target" | tr -d .)" --abi abi3 --abi none --platform any \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    -d "$into" $specs

# DeepSpeed comes as source alone; a wheel without compiled operators is the same everywhere.
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$into" "$(pinned deepspeed)" ||
    echo "no wheel of deepspeed: its trials will be skipped" >&2

# bitsandbytes carries a library for each CUDA: one and the CPU's are 8 MB instead of 150.
"$python" - "$into" "$cuda" <<'PY'
import pathlib, re, sys, zipfile

folder, cuda = pathlib.Path(sys.argv[1]), sys.argv[2]
for wheel in folder.glob("bitsandbytes-*.whl"):
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in old.infolist():
            if not entry.filename.endswith(".so") or re.search(rf"cuda{cuda}|_cpu\.so", entry.filename):
                out.writestr(entry, old.read(entry))
    new.replace(wheel)
sizes = {wheel.name: wheel.stat().st_size / 1e6 for wheel in sorted(folder.glob("*.whl"))}
print("\n".join(f"{size:7.2f} MB  {name}" for name, size in sizes.items()))
print(f"{sum(sizes.values()):7.2f} MB  in all")
PY
