#!/usr/bin/env bash
# Builds each package's wheel and runs the package's tests against the installed wheel, from outside the source tree.
#
#   ci/build_wheels.sh [OUT]        OUT: where the wheels go (dist)
#
# PYTHON chooses the interpreter (python3), PIP_ARGS is passed to pip.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(mkdir -p "${1:-$root/dist}" && cd "${1:-$root/dist}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
read -r -a pip_args <<<"${PIP_ARGS:-}"

# Lowest in the graph first: each package is tested with nothing of ours but what it depends on.
for name in deepnvme cpu_adam zero3 zinf; do
    echo "== $name"
    "${PYTHON:-python3}" -m venv "$work/$name"
    pip=("$work/$name/bin/python" -m pip install --quiet -c "$root/ci/constraints.txt" "${pip_args[@]}")
    "$work/$name/bin/python" -m pip wheel --quiet --no-deps "${pip_args[@]}" --wheel-dir "$out" "$root/packages/$name"
    "${pip[@]}" --find-links "$out" pytest pytest-timeout hypothesis "$out/$name"-*.whl
    # A copy of the tests alone: no source folder beside them that could be imported in the wheel's place.
    mkdir "$work/$name-tests"
    cp -r "$root/packages/$name/tests" "$work/$name-tests/tests"
    cp "$root/pyproject.toml" "$work/$name-tests/"
    (cd "$work/$name-tests" && "$work/$name/bin/python" -m pytest -m "not slow and not root and not peers" tests)
done
ls "$out"
