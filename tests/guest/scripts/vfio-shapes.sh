# Controllers of many shapes: namespaces, several controllers, small limits, CMB and PMR.
modprobe vfio_iommu_type1
modprobe vfio-pci
for function in $SHAPES; do
    take "$function"
done
nvme-gpu list
# Two controllers of one subsystem see the same namespaces.
small=vfio:0000:00:10.0
twin=vfio:0000:00:11.0
head -c 262144 /dev/urandom >/tmp/data
nvme-gpu list-ns --device $small
nvme-gpu write --device $small --lba 0 --in /tmp/data --allow-write
nvme-gpu compare --device $twin --lba 0 --in /tmp/data
guest-tests transfers $small 1
guest-tests queues $small 1
# A format with metadata is refused, with the reason.
for nsid in 2 3; do
    fails_with 1 nvme-gpu read --device $small --namespace-id $nsid --blocks 1 --out /tmp/out 2>/tmp/said
    cat /tmp/said
    grep -q 'metadata' /tmp/said
done
# 4096-byte blocks on a controller with CMB and PMR and no limit on transfers.
wide=vfio:0000:00:12.0
guest-tests transfers $wide 1
guest-tests queues $wide 1
# A zoned namespace belongs to another command set and is refused by name; the ordinary one beside it works.
zoned=vfio:0000:00:13.0
for verb in 'write --lba 0 --in /tmp/data --allow-write' 'read --blocks 1 --out /tmp/out'; do
    fails_with 1 nvme-gpu $verb --device $zoned 2>/tmp/said
    cat /tmp/said
    grep -q 'command set 2 (zoned)' /tmp/said
done
nvme-gpu write --device $zoned --namespace-id 2 --lba 0 --in /tmp/data --allow-write
nvme-gpu compare --device $zoned --namespace-id 2 --lba 0 --in /tmp/data
# The smallest queues there are, and two controllers in one process.
tiny=vfio:0000:00:14.0
guest-tests queues $tiny 1
guest-tests transfers $tiny 1
leave $SHAPES
# Linux has a use for the memory buffer only with peer-to-peer support.
dmesg_clean 'failed to register the CMB'
