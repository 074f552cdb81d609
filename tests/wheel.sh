#!/usr/bin/env bash
# The wheel, as a user gets it: built from the files that git knows, with all of the product in it and nothing else,
# installed into a clean environment, tried from an empty folder, uninstalled without a trace: `make wheel`.
#   PYTHONS="3.12 3.13"  other Pythons than this one
#   EXTRAS=1             each extra in an environment of its own as well
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export HF_HUB_OFFLINE=1 ISOBATCH_CACHE="$work/cache" ISOBATCH_STATE="$work/state"
# uv unpacks a library once and links it into each environment; where pip finds libraries, it does.
export UV_CONSTRAINT="${UV_CONSTRAINT-$root/requirements.lock}" UV_FIND_LINKS="${UV_FIND_LINKS-${PIP_FIND_LINKS-}}"
export SSL_CERT_FILE="${SSL_CERT_FILE-${PIP_CERT-}}" UV_NO_PROGRESS=1
[ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
python=${PYTHON:-python3}
uv() { "$python" -m uv --quiet "$@"; }

# git's files alone: a folder build/ of an earlier wheel would end up in this one.
mkdir "$work/source" "$work/empty"
git -C "$root" ls-files -z | (cd "$root" && xargs -0 tar -c --ignore-failed-read) | tar -x -C "$work/source"
uv build --wheel --out-dir "$work" "$work/source" ||
  "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work" "$work/source"
wheel=$(echo "$work"/*.whl)

"$python" - "$wheel" "$work/source" <<'PYTHON'
import sys, zipfile
from pathlib import Path

root = Path(sys.argv[2])
folders = "core data engine launch models configs".split()
files = [f for folder in folders for f in (root / folder).rglob("*") if f.is_file()]
files += [root / name for name in ("__init__.py", "__init__.pyi", "__main__.py", "py.typed")]
wanted = {f"isobatch/{f.relative_to(root)}" for f in files}
found = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
if wanted != found:
    sys.exit(f"not in the wheel: {sorted(wanted - found)}; nobody's: {sorted(found - wanted)}")
print(f"{Path(sys.argv[1]).name}: the product's {len(found)} files")
PYTHON

# environment NAME PYTHON WHEEL: $bin and $site are its folders. Where no index can be reached in four minutes, the
# libraries are those of the tests, whose .pth files, that of this clone too, do not count there.
environment() {
  local purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  uv venv --python "$2" "$work/$1"
  bin="$work/$1/bin"
  site=$("$bin/python" -c "$purelib")
  timeout 240 "$python" -m uv --quiet pip install --python "$bin/python" "$3" && return
  echo "wheel: $3 is tried with the libraries of $python, as its own cannot be had here"
  uv pip install --no-deps --python "$bin/python" "${3%%[*}"
  "$python" -c "$purelib" > "$site/lent.pth"
}

try() {  # try PYTHON: install, use, uninstall
  environment "python-${1##*/}" "$1" "$wheel"
  (
    cd "$work/empty"
    "$bin/isobatch" --version
    "$bin/python" -c "import isobatch; assert isobatch.__file__.startswith('$site')"
    "$bin/isobatch" doctor
    "$bin/isobatch" auto --task causal-lm --steps 3 --name "${1##*/}" --again --quiet
    "$bin/isobatch" verify "runs/${1##*/}" --level records
    "$bin/isobatch" slurm --task causal-lm --nodes 2 --gpus-per-node 8 --time 1:00:00 --partition p > job.sh
    bash -n job.sh
  )
  uv pip uninstall --python "$bin/python" isobatch
  local left
  left=$(find "$bin" "$site" -iname '*isobatch*')
  [ -z "$left" ] || { echo "left by the uninstaller: $left"; return 1; }
}

extra() {  # extra NAME: the libraries that it brings can be imported where nothing else is installed
  environment "extra-$1" "$python" "$wheel[$1]"
  (cd "$work/empty" && "$bin/python" - "$1" <<'PYTHON'
import importlib, sys
from isobatch.core.extras import EXTRAS

libraries = [library for library, extra in EXTRAS.items() if extra == sys.argv[1]]
for library in libraries:
    importlib.import_module(library)
print(f"isobatch[{sys.argv[1]}]: {', '.join(libraries)}")
PYTHON
  )
  rm -rf "$work/extra-$1"
}

for one in ${PYTHONS:-$python}; do
  try "$one"
done
(cd "$work/empty" && timeout 240 "$python" -m uv --quiet tool run --from "$wheel" isobatch --version) ||
  echo "wheel: not tried by uvx, as its libraries cannot be had here"
if [ -n "${EXTRAS-}" ]; then
  for name in $("$python" -c "
import tomllib
names = tomllib.load(open('$root/pyproject.toml', 'rb'))['project']['optional-dependencies']
print(*(name for name in names if name not in ('all', 'dev')))"); do
    extra "$name"
  done
fi
