#!/bin/sh
# run.sh SECONDS PROCESSES [TARGET...]: every fuzz target of this folder for SECONDS, PROCESSES at a time.
# Writes $OUT (here, when unset): logs, artifacts of crashes, and the corpora when $CORPUS does not name
# a folder for them (there, a later run goes on). Ends with a line for each target; fails after a crash.
set -u
one() {
    target=$1
    mkdir -p "$CORPUS/$target"
    words=
    [ -f "$here/dictionaries/$target.dict" ] && words=-dict=$here/dictionaries/$target.dict
    number=0
    while [ "$number" -lt "$each" ]; do
        nice -n 19 timeout $((seconds + 120)) "$here/bin/$target" \
            "$CORPUS/$target" "$here/corpus/$target" $words -reload=10 \
            -max_total_time="$seconds" -timeout=30 -max_len=4096 -print_final_stats=1 \
            -artifact_prefix="$OUT/artifacts/$target-" >"$OUT/logs/$target.$number.log" 2>&1 \
            || echo "exit $?" >>"$OUT/logs/$target.$number.log" &
        number=$((number + 1))
    done
    wait
}
if [ "${1:-}" = --one ]; then
    one "$2"
    exit
fi
here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:?usage: run.sh SECONDS PROCESSES [TARGET...]}
processes=${2:?usage: run.sh SECONDS PROCESSES [TARGET...]}
shift 2
[ -d "$here/bin" ] || tar xzf "$here/fuzz.tar.gz" -C "$here" || exit
[ $# -gt 0 ] || set -- $(ls "$here/bin")
OUT=${OUT:-$here/out}
CORPUS=${CORPUS:-$OUT/corpus}
mkdir -p "$OUT/artifacts" "$OUT/logs" "$CORPUS"
if ldd "$here/bin/$1" 2>&1 | grep -q 'not found'; then
    export LD_LIBRARY_PATH="$here/lib"
fi
if ! "$here/bin/$1" -runs=1 >"$OUT/logs/first.log" 2>&1; then
    # Leaks cannot be looked for where a process may not trace itself.
    export ASAN_OPTIONS=detect_leaks=0
    echo "without the search for leaks: $(tail -n 1 "$OUT/logs/first.log")"
    "$here/bin/$1" -runs=1 || exit
fi
each=$((processes / $#))
[ "$each" -ge 1 ] || each=1
export here OUT CORPUS seconds each
start=$(date +%s)
printf '%s\n' "$@" | xargs -n 1 -P "$processes" "$0" --one
echo "all of it: $(($(date +%s) - start)) s, $each process(es) for each of $# targets"
bad=0
for target in "$@"; do
    runs=$(cat "$OUT/logs/$target".*.log | sed -n 's/^stat::number_of_executed_units: *//p' |
        awk '{ sum += $1 } END { print sum + 0 }')
    edges=$(cat "$OUT/logs/$target".*.log | sed -n 's/.* cov: \([0-9]*\) ft: \([0-9]*\).*/\1 \2/p' |
        sort -n | tail -n 1)
    crashes=$(ls "$OUT/artifacts" | grep -c "^$target-")
    exits=$(cat "$OUT/logs/$target".*.log | grep -c '^exit ')
    [ "$crashes$exits" = 00 ] || bad=1
    files=$(ls "$CORPUS/$target" | wc -l)
    echo "$target: $runs runs, edges and features $edges, $files inputs kept," \
        "$crashes artifacts, $exits processes failed"
done
exit $bad
