#!/bin/sh
# Runs the C face's programs on the GPU of this machine: see build.sh. Each says ": ok" at its end. FAILED at the end of
# the output names those that did not.
cd "$(dirname "$0")" || exit 1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
failed=
try() {
    echo "== $*"
    timeout 120 "$@" || failed="$failed $1"
}
try ./histogram ./histogram.cubin
try ./device ./histogram.cubin
try ./stream 5000
try ./stream 5000
try ./bad
try ./faults /tmp/nvme-gpu-c-image
if command -v compute-sanitizer >/dev/null; then
    try compute-sanitizer --error-exitcode 9 ./histogram ./histogram.cubin
fi
test -z "$failed" || { echo "FAILED:$failed"; exit 1; }
echo "all: ok"
