#!/bin/sh
# Make the virtual environment .venv and install Evener into it. Usage: scripts/setup.sh EXTRAS
# Runs again only when pyproject.toml, constraints.txt or the extras changed. TORCH_INDEX: a package index to prefer for torch.
set -eu
cd "$(dirname "$0")/.."
extras=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "evener needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1 || echo absent) (set PYTHON=python3.x)" >&2
    exit 2
}
stamp=".venv/.evener-$(printf '%s' "$extras" | tr , -)"
wanted=$(cat pyproject.toml constraints.txt | cksum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

if [ ! -x .venv/bin/pip ]; then
    "$python" -m venv .venv 2>/dev/null || {
        echo "python's venv is missing: apt install python3-venv" >&2
        exit 2
    }
    # The pip that Python brings may take three times as long to choose the versions. Without a newer one it goes on.
    .venv/bin/pip install --quiet --disable-pip-version-check --upgrade pip 2>/dev/null || true
fi
index=${TORCH_INDEX:+--extra-index-url $TORCH_INDEX}
torch=$(grep '^torch==' constraints.txt)
if [ ! -d .venv/lib/python3*/site-packages/torch ]; then
    # shellcheck disable=SC2086
    if .venv/bin/pip install --quiet --dry-run --no-deps --report - $index "$torch" 2>/dev/null | grep -q '"nvidia-'; then
        echo "NOTE: pip takes the CUDA build of torch here (several GB). For the CPU build, which is all the demo needs," >&2
        echo "      stop this and give PyTorch's CPU index as TORCH_INDEX; README.md, section Install, shows the line." >&2
    fi
fi
echo "installing evener[$extras] into .venv"
# shellcheck disable=SC2086
.venv/bin/pip install --quiet --disable-pip-version-check --no-compile $index -c constraints.txt -e ".[$extras]"
# pip compiles on one core, and all there is. What is left out here (tests, hundreds of model families) compiles when it is imported.
.venv/bin/python -m compileall -q -j 0 -x 'site-packages/.*/(tests|models)/' .venv/lib/python3*/site-packages >/dev/null 2>&1 || true
echo "$wanted" > "$stamp"
