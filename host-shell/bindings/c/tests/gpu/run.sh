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
try ./seeds ./seeds-file 0.5
try ./demo_gds ./seeds-file 12345 4194304
export NVME_GPU_DEVICE="sim:mem?size=16MiB&queues=32"
try ./demo_spdk
unset NVME_GPU_DEVICE
rm -f ./seeds-file
# What this machine's cuFile answers, on its disk and on tmpfs.
try ./gds ./gds-file any
try ./gds /dev/shm/nvme-gpu-gds-file any
rm -f ./gds-file /dev/shm/nvme-gpu-gds-file
if test -x ./fio; then
    job="env LD_LIBRARY_PATH=. ./fio --ioengine=external:./fio-nvme_gpu.so --name=a --bs=4k --iodepth=128 --size=64m"
    try $job --device='sim:./fio.img?size=64MiB&queues=32&threads=8' --data=gpu --rw=write --verify=crc32c
    read="--device=sim:./fio.img?queues=32&threads=8 --data=gpu --rw=randread"
    try $job $read --initiator=gpu --verify=crc32c
    try $job $read --initiator=gpu --time_based --runtime=3
    try $job $read --initiator=cpu --time_based --runtime=3
    rm -f ./fio.img
fi
if command -v compute-sanitizer >/dev/null; then
    try compute-sanitizer --report-api-errors no --error-exitcode 9 ./histogram ./histogram.cubin
fi
test -z "$failed" || { echo "FAILED:$failed"; exit 1; }
echo "all: ok"
