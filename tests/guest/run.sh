# Runs one test file with the helpers below it in scope: sh -eu /tests/run.sh NAME
. /tests/lib.sh
dmesg -c >/tmp/dmesg.before
. "/tests/$1.sh"
