#!/usr/bin/env bash
# The wheel with the extra `proxy` installs and imports in an empty environment, and brings neither torch nor SQLAlchemy.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/pip wheel --quiet --no-deps --wheel-dir "$folder" .
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt "$(ls "$folder"/evener-*.whl)[proxy]"
cd "$folder"
venv/bin/python - <<'P'
import importlib.util
import evener_engine, evener_learner, evener_orchestrator, evener_runner, evener_verifier  # noqa: F401  (the packages are in the wheel)
import evener.cli.main, evener_proxy.service  # noqa: F401

for absent in ("torch", "sqlalchemy"):
    assert importlib.util.find_spec(absent) is None, f"the extra proxy brings {absent}"
P
venv/bin/evener --help >/dev/null
echo "wheel: ok"
