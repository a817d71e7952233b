"""A graph network whose node features lie on NVMe: an epoch of GraphSAGE with PyTorch Geometric.

    python gnn.py [--cpu] [--nodes 20000] [--epochs 1]

`Features` is a FeatureStore of PyG over tables: `store[group, name, ids]` is `table[ids]`. Each batch samples two hops
by torch alone and gathers the features of the nodes that it met. The same epoch runs with the features in memory; both
give the same losses. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch_geometric.data import FeatureStore, TensorAttr
from torch_geometric.nn import SAGEConv

import nvme_gpu

WIDTH, CLASSES, FAN, BATCH = 64, 4, (10, 5), 256


class Features(FeatureStore):
    """Features of nodes as tables of a store, one for each (group, name)."""

    def __init__(self, store: nvme_gpu.Store) -> None:
        super().__init__()
        self.store, self.tables, self.end = store, {}, 0

    def _put_tensor(self, tensor, attr: TensorAttr) -> bool:
        key = (attr.group_name, attr.attr_name)
        if attr.index is not None:
            self.tables[key].scatter(attr.index, tensor)
            return True
        self.store.write_from(tensor.contiguous().cpu(), self.end).result()
        self.tables[key] = self.store.table(self.end, shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.end += self.tables[key].nbytes
        return True

    def _get_tensor(self, attr: TensorAttr):
        table = self.tables.get((attr.group_name, attr.attr_name))
        if table is None:
            return None
        ids = attr.index
        if ids is None or isinstance(ids, slice):
            ids = torch.arange(len(table))[slice(None) if ids is None else ids]
        return table[ids]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self.tables.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr):
        return self.tables[attr.group_name, attr.attr_name].shape

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(group, name) for group, name in self.tables]


class Sage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, 32), SAGEConv(32, CLASSES)

    def forward(self, features, edges):
        return self.second(self.first(features, edges).relu(), edges)


def graph(nodes: int):
    """Features that say a little of a node's class, and neighbours that often have the same class."""
    generator = torch.Generator().manual_seed(7)
    classes = torch.randint(0, CLASSES, (nodes,), generator=generator)
    centres = torch.randn(CLASSES, WIDTH, generator=generator) * 0.4
    features = torch.randn(nodes, WIDTH, generator=generator) + centres[classes]
    degree = 12
    order = torch.argsort(classes)
    begins = torch.searchsorted(classes[order], torch.arange(CLASSES))
    counts = torch.bincount(classes, minlength=CLASSES)
    inside = torch.rand(nodes, degree, generator=generator) * counts[classes].unsqueeze(1)
    same = order[(begins[classes].unsqueeze(1) + inside.long()).clamp(max=nodes - 1)]
    other = torch.randint(0, nodes, (nodes, degree), generator=generator)
    is_same = torch.rand(nodes, degree, generator=generator) < 0.7
    return features, classes, torch.where(is_same, same, other)


def sampled(neighbours, seeds, generator):
    """Nodes that two hops from `seeds` meet, seeds first, and the edges between them by place."""
    found, edges, last = seeds, [], seeds
    for fan in FAN:
        columns = torch.randint(0, neighbours.shape[1], (len(last), fan), generator=generator).to(last.device)
        met = neighbours[last].gather(1, columns)
        edges.append(torch.stack([met.reshape(-1), last.repeat_interleave(fan)]))
        last = met.reshape(-1).unique()
        found = torch.cat([found, last])
    nodes, places = found.unique(return_inverse=True)
    pairs = torch.searchsorted(nodes, torch.cat(edges, 1))
    return nodes, pairs, places[: len(seeds)]


def run(of_nodes, classes, neighbours, epochs: int, place: torch.device):
    """Losses, the share of the last batches that was right, and seconds."""
    torch.manual_seed(3)
    model = Sage().to(place)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(11)
    losses, right, met = [], [], 0
    begin = time.perf_counter()
    for _ in range(epochs):
        for seeds in torch.randperm(len(classes), generator=generator).split(BATCH):
            nodes, edges, places = sampled(neighbours, seeds.to(place), generator)
            answers = model(of_nodes(nodes), edges)[places]
            wanted = classes[seeds.to(place)]
            loss = torch.nn.functional.cross_entropy(answers, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            right.append((answers.argmax(1) == wanted).float().mean())
            met += len(nodes)
    losses = torch.stack(losses).cpu()
    return losses, torch.stack(right[-10:]).mean().item(), met, time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=1)
    words = parser.parse_args()
    use_gpu = not words.cpu and torch.cuda.is_available()
    place = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
    torch.use_deterministic_algorithms(not use_gpu)
    features, classes, neighbours = graph(words.nodes)
    nbytes = features.numel() * 4 + (1 << 20)
    device = f"sim:mem?size={nbytes}&block=512&queues=32&threads=2"
    classes, neighbours = classes.to(place), neighbours.to(place)
    with nvme_gpu.open(device, 0 if use_gpu else None) as store:
        of_nvme = Features(store)
        of_nvme["node", "x", None] = features
        by_nvme = run(lambda ids: of_nvme["node", "x", ids], classes, neighbours, words.epochs, place)
        of_nvme.tables["node", "x"].check()
        some = torch.randint(0, words.nodes, (1000,))
        same_rows = torch.equal(of_nvme["node", "x", some.to(place)].cpu(), features[some])
    in_memory = features.to(place)
    by_memory = run(lambda ids: in_memory[ids], classes, neighbours, words.epochs, place)
    difference = (by_nvme[0] - by_memory[0]).abs().max().item()
    # On a GPU the sums of messages have no fixed order.
    right = same_rows and difference < (0.05 if use_gpu else 1e-6) and by_nvme[1] > 1.5 / CLASSES
    answer = {
        "nodes": words.nodes,
        "row_bytes": WIDTH * 4,
        "on": str(place),
        "batches": len(by_nvme[0]),
        "rows_gathered": by_nvme[2],
        "accuracy": round(by_nvme[1], 3),
        "largest_difference_of_losses": difference,
        "seconds": {"features on NVMe": round(by_nvme[3], 3), "features in memory": round(by_memory[3], 3)},
        "checked": "right" if right else "WRONG",
    }
    print(json.dumps(answer))
    return 0 if right else 3


if __name__ == "__main__":
    sys.exit(main())
