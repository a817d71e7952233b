"""Training with an embedding whose weights lie on NVMe, beside the same training with nn.Embedding in memory.

    python embedding_training.py [--cpu] [--rows 1000] [--steps 100] [--device DEVICE]

Users and items are rows of two tables; their dot products learn to be given ratings. Both trainings begin with the same
weights and see the same batches: their losses and weights are compared. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

import nvme_gpu
from nvme_gpu.torch import DiskEmbedding, DiskSGD

WIDTH, BATCH, RATE = 32, 512, 10.0


def batches(rows: int, steps: int, device: torch.device):
    """Pairs of a user and an item with a rating; few are asked for often, as in life."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        skewed = torch.rand(2, BATCH, generator=generator).pow(2) * rows
        users, items = skewed.long()
        ratings = ((users * 31 + items * 17) % 5).float() / 4
        yield users.to(device), items.to(device), ratings.to(device)


def train(users, items, optimizer, rows: int, steps: int, device: torch.device):
    """Losses of the steps, and seconds."""
    losses = []
    begin = time.perf_counter()
    for user, item, rating in batches(rows, steps, device):
        loss = ((users(user) * items(item)).sum(1) - rating).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = torch.stack(losses).cpu()
    return found, time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", help="another store than a simulated drive; its first bytes are overwritten")
    words = parser.parse_args()
    use_gpu = not words.cpu and torch.cuda.is_available()
    place = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
    nbytes = words.rows * WIDTH * 4
    device = words.device or f"sim:mem?size={2 * nbytes + (1 << 20)}&block=512&queues=32&threads=4"
    torch.manual_seed(1)
    weights = [torch.randn(words.rows, WIDTH) * 0.3 for _ in range(2)]

    dense = [torch.nn.Embedding(words.rows, WIDTH, _weight=one.clone()).to(place) for one in weights]
    sgd = torch.optim.SGD([one.weight for one in dense], lr=RATE)
    of_memory, dense_seconds = train(*dense, sgd, words.rows, words.steps, place)

    with nvme_gpu.open(device, 0 if use_gpu else None) as store:
        tables = []
        for index, one in enumerate(weights):
            store.write_from(one, index * nbytes).result()
            tables.append(store.table(index * nbytes, shape=(words.rows, WIDTH), dtype="float32"))
        disk = [DiskEmbedding(table) for table in tables]
        sgd = DiskSGD([one.weight for one in disk], lr=RATE)
        of_disk, disk_seconds = train(*disk, sgd, words.rows, words.steps, place)
        for table in tables:
            table.check()
        difference = 0.0
        for table, one in zip(tables, dense):
            trained = table[torch.arange(words.rows)]
            difference = max(difference, (trained - one.weight.detach().cpu()).abs().max().item())
    losses = (of_disk - of_memory).abs().max().item()
    learned = of_disk[-5:].mean().item() < 0.9 * of_disk[:5].mean().item()
    right = losses < 1e-3 and difference < 1e-3 and learned
    answer = {
        "rows": words.rows,
        "steps": words.steps,
        "on": str(place),
        "first_losses": round(of_disk[:5].mean().item(), 4),
        "last_losses": round(of_disk[-5:].mean().item(), 4),
        "largest_difference_of_losses": losses,
        "largest_difference_of_weights": difference,
        "seconds": {"DiskEmbedding": round(disk_seconds, 3), "nn.Embedding": round(dense_seconds, 3)},
        "checked": "right" if right else "WRONG",
    }
    print(json.dumps(answer))
    return 0 if right else 3


if __name__ == "__main__":
    sys.exit(main())
