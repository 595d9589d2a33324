#!/bin/sh
# Builds the C++ tests plainly, with the thread sanitizer and with the address and undefined-behaviour sanitizers, and
# runs them. Needs cmake and ninja. usage: sanitize.sh [BUILD_DIRECTORY]
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$source/build/sanitize}
mkdir -p "$build"

quietly() {
  "$@" >"$build/log" 2>&1 || { cat "$build/log"; exit 1; }
}

for sanitizer in none thread address,undefined; do
  echo "== sanitizer: $sanitizer"
  directory=$build/$(echo "$sanitizer" | tr , -)
  flags=$(echo "$sanitizer" | sed s/none//)
  quietly cmake -S "$source" -B "$directory" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDEEPNVME_TESTS=ON \
    -DDEEPNVME_SANITIZE="$flags"
  quietly cmake --build "$directory" -j 2
  # Without random addresses: the thread sanitizer of older compilers does not know all of them.
  quietly setarch "$(uname -m)" -R ctest --test-dir "$directory" --output-on-failure
  grep -E "Passed|tests passed" "$build/log"
done
