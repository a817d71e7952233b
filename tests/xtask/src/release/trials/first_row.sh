#!/bin/sh
# Prints the seconds from the start of `pip install WHEEL`, in a new environment of PYTHON in FOLDER, to the first row
# that was written, read and compared; fails when they are more than LIMIT. Packages come from the index, not from a
# cache. No GPU, no Rust and no drive are used.
# usage: first_row.sh PYTHON WHEEL FOLDER [LIMIT]
set -eu
python=$1 wheel=$2 folder=$3 limit=${4:-60}
"$python" -m venv --clear "$folder"
begin=$(date +%s%N)
"$folder/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --only-binary=:all: "$wheel"
installed=$(date +%s%N)
cd "$folder"
bin/python - <<'END'
import nvme_gpu

with nvme_gpu.open("sim:mem?size=64MiB") as store:
    table = store.table(0, shape=(1000, 16), dtype="float32")
    row = [float(number) for number in range(16)]
    table.scatter([7], [row])
    if table[[7]].tolist() != [row]:
        raise SystemExit("the row that was read is not the row that was written")
END
end=$(date +%s%N)
milliseconds=$(((end - begin) / 1000000))
echo "first row after $((milliseconds / 1000)).$((milliseconds % 1000 / 100)) s, of these pip" \
    "$(((installed - begin) / 1000000000)) s"
test "$milliseconds" -le "$((limit * 1000))"
