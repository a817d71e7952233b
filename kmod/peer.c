// SPDX-License-Identifier: GPL-2.0-only
/* Where a physical address lies: RAM, or a BAR of another function. */
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/pci-p2pdma.h>

#include "nvme_gpu.h"

/*
 * Whether transactions of @self arrive at @peer, as far as this kernel knows:
 * one without CONFIG_PCI_P2PDMA, as Debian's, does not know host bridges.
 */
static bool arrives(struct pci_dev *self, struct pci_dev *peer)
{
	struct device *client = &self->dev;

	if (!IS_ENABLED(CONFIG_PCI_P2PDMA) || nvme_gpu_unsafe())
		return true;
	return pci_p2pdma_distance_many(peer, &client, 1, false) >= 0;
}

static bool holds(struct pci_dev *peer, int bar, phys_addr_t at)
{
	return pci_resource_flags(peer, bar) & IORESOURCE_MEM &&
	       pci_resource_len(peer, bar) &&
	       at >= pci_resource_start(peer, bar) &&
	       at <= pci_resource_end(peer, bar);
}

/*
 * Finds the RAM page or the BAR that @at lies in. -EREMOTEIO: neither;
 * -EHOSTUNREACH: a BAR that the function is not known to reach.
 */
int nvme_gpu_extent_of(struct pci_dev *self, phys_addr_t at,
		       struct nvme_gpu_extent *found)
{
	struct pci_dev *peer = NULL;
	bool is_reached;
	int bar;

	if (page_is_ram(PHYS_PFN(at))) {
		found->first = at & PAGE_MASK;
		found->last = found->first + PAGE_SIZE - 1;
		found->place = NVME_GPU_PLACE_RAM;
		return 0;
	}
	for_each_pci_dev(peer) {
		if (peer == self)
			continue;
		for (bar = 0; bar < PCI_STD_NUM_BARS; bar++) {
			if (!holds(peer, bar, at))
				continue;
			found->first = pci_resource_start(peer, bar);
			found->last = pci_resource_end(peer, bar);
			found->place = NVME_GPU_PLACE_PEER;
			is_reached = arrives(self, peer);
			pci_dev_put(peer);
			return is_reached ? 0 : -EHOSTUNREACH;
		}
	}
	return -EREMOTEIO;
}
