// SPDX-License-Identifier: GPL-2.0-only
/* Events for the opener, and the eventfd that signals them. */
#include <linux/eventfd.h>

#include "nvme_gpu.h"

/* With the function's event_lock held. */
void nvme_gpu_raise(struct nvme_gpu_opener *opener, u32 event)
{
	opener->events |= event;
	if (opener->event)
		eventfd_signal(opener->event);
}

/* Also under the reservation lock of a dma-buf, and where nothing may sleep. */
void nvme_gpu_signal(struct nvme_gpu_opener *opener, u32 event)
{
	unsigned long flags;

	spin_lock_irqsave(&opener->of->event_lock, flags);
	nvme_gpu_raise(opener, event);
	spin_unlock_irqrestore(&opener->of->event_lock, flags);
}

/* The same for the present opener of the function, if there is one. */
void nvme_gpu_tell(struct nvme_gpu_function *of, u32 event)
{
	mutex_lock(&of->lock);
	if (of->opener)
		nvme_gpu_signal(of->opener, event);
	mutex_unlock(&of->lock);
}

/* Takes the reference @by, which may be NULL. */
void nvme_gpu_watch(struct nvme_gpu_opener *opener, struct eventfd_ctx *by)
{
	struct eventfd_ctx *old;
	unsigned long flags;

	spin_lock_irqsave(&opener->of->event_lock, flags);
	old = opener->event;
	opener->event = by;
	/* Nothing that came before is lost. */
	if (by && opener->events)
		eventfd_signal(by);
	spin_unlock_irqrestore(&opener->of->event_lock, flags);
	if (old)
		eventfd_ctx_put(old);
}
