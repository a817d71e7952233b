apt-get update -qq
apt-get install -qq -y /given/*.deb bash-completion >/dev/null
cd /tmp
@SMOKE@ --json | tee answer
grep -q '"verified": *true' answer
test -s /usr/share/man/man1/nvme-gpu.1.gz || grep -q '^path-exclude=/usr/share/man' /etc/dpkg/dpkg.cfg.d/* 2>/dev/null
bash -c '. /usr/share/bash-completion/completions/nvme-gpu && complete -p nvme-gpu'
apt-get purge -qq -y nvme-gpu >/dev/null
test ! -e /usr/bin/nvme-gpu
