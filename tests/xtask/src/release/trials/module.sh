rule=/etc/udev/rules.d/60-nvme-gpu.rules
apt-get update -qq
apt-get install -qq -y --no-install-recommends linux-headers-amd64 dkms >/dev/null
apt-get install -qq -y --no-install-recommends /given/*.deb
for headers in /usr/src/linux-headers-*-amd64; do
    kernel=${headers#/usr/src/linux-headers-}
    dkms install nvme-gpu -k "$kernel" || dkms install "$(dkms status nvme-gpu | sed 's/[,:].*//;q')" -k "$kernel"
    dkms status nvme-gpu -k "$kernel" | grep installed
    find "/lib/modules/$kernel" -name 'nvme_gpu.ko*' | grep .
done
cmp "$rule" /given/60-nvme-gpu.rules
dpkg-query -W -f='${Conffiles}' nvme-gpu-dkms | grep "$rule"
echo '# edited' >>"$rule"
apt-get install -qq -y --reinstall -o Dpkg::Options::=--force-confdef /given/*.deb
grep '# edited' "$rule"
apt-get remove -qq -y nvme-gpu-dkms
test -z "$(dkms status nvme-gpu)"
grep '# edited' "$rule"
apt-get purge -qq -y nvme-gpu-dkms
test ! -e "$rule"
test -z "$(find /lib/modules -name 'nvme_gpu.ko*')"
