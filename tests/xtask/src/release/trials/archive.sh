cd /tmp
tar --extract --file /given/*.tar.gz --strip-components=1
PATH=/tmp/bin:$PATH
@SMOKE@ --json | tee answer
grep -q '"verified": *true' answer
test -s share/man/man1/nvme-gpu-read.1
test -s share/bash-completion/completions/nvme-gpu
