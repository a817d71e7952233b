#!/usr/bin/env python3
"""Draws the figures of README.md and docs/architecture.md from the tables below.

    python3 docs/figures/draw.py            writes every figure beside this script
    python3 docs/figures/draw.py --check    fails when a committed figure differs from its table

A figure is a size, boxes (left, top, width, height, kind, lines of text) and arrows (from x, y to x, y, label). The
label of an arrow without text is "", that of a dashed line None.
"""

import pathlib
import sys
from xml.sax.saxutils import escape

KINDS = {  # fill, stroke
    "user": ("#fdf3dc", "#a9852f"),
    "library": ("#e8f0fa", "#3f6ea5"),
    "gpu": ("#eaf5e6", "#5d8f4c"),
    "device": ("#f6e9e6", "#a5583f"),
    "memory": ("#f1edf7", "#6f57a0"),
    "note": ("#ffffff", "#ffffff"),
}


def sequence(title, columns, steps):
    """Lays out participants side by side, and steps (from, to, label) one below the other."""
    width, left, first, step = 820, 16, 84, 34
    wide = (width - 2 * left - 16 * (len(columns) - 1)) // len(columns)
    middle = [left + number * (wide + 16) + wide // 2 for number in range(len(columns))]
    height = first + step * len(steps)
    boxes = [(left + number * (wide + 16), 16, wide, 36, kind, [name]) for number, (kind, name) in enumerate(columns)]
    arrows = [(x, 52, x, height - 8, None) for x in middle]
    for number, (source, target, label) in enumerate(steps):
        y = first + step * number
        if source == target:
            arrows.append((middle[source] - 60, y, middle[source] + 60, y, label))
        else:
            arrows.append((middle[source], y, middle[target], y, label))
    return title, width, height, boxes, arrows


FIGURES = {
    "overview": (
        "From your program to the drive",
        820,
        452,
        [
            (
                16,
                24,
                788,
                68,
                "user",
                [
                    "Your program",
                    "Python, PyTorch   |   C, C++   |   Rust   |   nvme-gpu, the tool   |   "
                    "fio   |   your own CUDA C++ or Rust kernel",
                ],
            ),
            (
                16,
                116,
                584,
                76,
                "library",
                [
                    "Library: nvme_host",
                    "stores and tables (rows by id)   |   layers of a model, experts",
                    "keys and values   |   vector search   |   files of an unmounted ext4",
                ],
            ),
            (624, 116, 180, 76, "gpu", ["Your kernel", "links nvme-core or", "nvme_gpu_device.cuh"]),
            (
                16,
                216,
                284,
                84,
                "library",
                [
                    "nvme-core on CPU threads",
                    "bring-up, recovery, reads of the host;",
                    "the GPU's queues after a fault",
                ],
            ),
            (
                324,
                216,
                480,
                84,
                "gpu",
                [
                    "nvme-core in GPU kernels (the same source, PTX)",
                    "builds commands, rings doorbells, polls " "completions;",
                    "every wait has a deadline, every row its status",
                ],
            ),
            (16, 324, 788, 44, "memory", ["Queues in memory: rings, doorbells, completions"]),
            (16, 392, 188, 48, "device", ["sim:", "simulated controller"]),
            (216, 392, 188, 48, "device", ["vfio-user:", "another process"]),
            (416, 392, 188, 48, "device", ["vfio:", "PCIe, behind an IOMMU"]),
            (616, 392, 188, 48, "device", ["kmod:", "PCIe, GPU memory"]),
        ],
        [
            (300, 92, 300, 116, ""),
            (714, 92, 714, 116, ""),
            (150, 192, 150, 216, ""),
            (460, 192, 460, 216, ""),
            (714, 192, 714, 216, ""),
            (150, 300, 150, 324, ""),
            (560, 300, 560, 324, ""),
            (110, 368, 110, 392, ""),
            (310, 368, 310, 392, ""),
            (510, 368, 510, 392, ""),
            (710, 368, 710, 392, ""),
        ],
    ),
    "crates": (
        "Programs, interfaces and crates",
        820,
        700,
        [
            (16, 16, 380, 56, "user", ["You", "Python, PyTorch, C, C++, fio, a shell, Rust"]),
            (424, 16, 380, 56, "user", ["You, in a kernel", "Rust or CUDA C++"]),
            (16, 100, 116, 74, "library", ["Python", "nvme_gpu,", "its _native"]),
            (148, 100, 116, 74, "library", ["Tool", "nvme-gpu"]),
            (280, 100, 116, 74, "library", ["C", "nvme_gpu.h,", "compat, fio"]),
            (16, 202, 248, 56, "library", ["nvme-models, nvme-search,", "nvme-course, over nvme-compute"]),
            (424, 202, 340, 56, "gpu", ["nvme-compute-kernel", "kernels that compute, and their CPU references"]),
            (16, 286, 380, 52, "library", ["nvme-host", "one name for the crates below it"]),
            (16, 362, 116, 70, "library", ["nvme-files", "tensors, ext4,", "layers"]),
            (148, 362, 116, 70, "library", ["nvme-store", "bytes, rows,", "stripes"]),
            (280, 362, 116, 70, "library", ["nvme-bench,", "nvme-doctor"]),
            (148, 456, 248, 52, "library", ["nvme-cuda", "CUDA, queues of kernels"]),
            (
                424,
                286,
                380,
                222,
                "gpu",
                [
                    "nvme-gpu-kernel",
                    "entry points, gathers, scatters;",
                    "library for kernels of yours,",
                    "nvme_gpu_device.cuh;",
                    "the committed PTX",
                ],
            ),
            (16, 532, 380, 52, "library", ["nvme-driver", "transports, DMA, bring-up, namespaces, queues"]),
            (220, 608, 380, 36, "memory", ["nvme-core: the driver core, without IO or clock"]),
            (220, 656, 380, 36, "memory", ["nvme-spec: NVMe wire types"]),
            (16, 608, 188, 84, "device", ["nvme-sim", "simulated controller,", "vfio-user server"]),
            (
                616,
                608,
                188,
                84,
                "device",
                ["Small crates", "nvme-formats, nvme-ext4,", "nvme-units: depend on", "nothing of the project"],
            ),
        ],
        [
            (74, 72, 74, 100, ""),
            (206, 72, 206, 100, ""),
            (338, 72, 338, 100, ""),
            (74, 174, 74, 202, ""),
            (206, 174, 206, 202, ""),
            (338, 174, 338, 286, ""),
            (140, 258, 140, 286, ""),
            (594, 258, 594, 286, ""),
            (784, 72, 784, 286, ""),
            (264, 230, 424, 230, ""),
            (74, 338, 74, 362, ""),
            (206, 338, 206, 362, ""),
            (338, 338, 338, 362, ""),
            (132, 397, 148, 397, ""),
            (280, 397, 264, 397, ""),
            (74, 432, 74, 532, ""),
            (206, 432, 206, 456, ""),
            (338, 432, 338, 456, ""),
            (396, 482, 424, 482, ""),
            (272, 508, 272, 532, ""),
            (340, 584, 340, 608, ""),
            (500, 508, 500, 608, ""),
            (110, 584, 110, 608, "as a device"),
            (410, 644, 410, 656, ""),
            (204, 674, 220, 674, ""),
        ],
    ),
    "path-submit": sequence(
        "Submit and complete on a GPU",
        [("gpu", "GPU threads"), ("memory", "Queue state, cells"), ("memory", "Rings"), ("device", "Controller")],
        [
            (0, 1, "1 claim a slot (CID) and a ring entry"),
            (0, 2, "2 eight lanes store the 64-byte entry, then fence"),
            (0, 3, "3 one thread rings the doorbell for all entries that are published"),
            (3, 2, "4 fetch entries"),
            (3, 2, "5 data, then completion"),
            (2, 0, "6 one thread reads completions for all (phase tag)"),
            (0, 1, "7 each status into its command's cell"),
            (1, 0, "8 a thread reads its own cell, or its deadline ends"),
        ],
    ),
    "path-gather": sequence(
        "Rows by ids: table[ids] on a stream",
        [
            ("user", "Caller's stream"),
            ("gpu", "Warps of nvme_gather"),
            ("memory", "Slots, host or GPU"),
            ("device", "Drive"),
        ],
        [
            (0, 1, "1 launch: ids, output; the call returns at once"),
            (1, 1, "2 pass the gate, claim an I/O context"),
            (1, 3, "3 one read for neighbouring rows, none for rows in the cache"),
            (3, 2, "4 blocks of the rows"),
            (3, 1, "5 completions; a time-out closes the gate and the host resets"),
            (2, 1, "6 copy rows out of the slots"),
            (1, 0, "7 rows in place, status of each, count of failures"),
        ],
    ),
    "path-kv": sequence(
        "Keys and values: attention over selected pages",
        [("user", "Stream of the model"), ("gpu", "Page selection"), ("gpu", "Paged attention"), ("device", "Drive")],
        [
            (0, 3, "1 full pages are scattered to the drive"),
            (0, 1, "2 minimum and maximum of each new page's keys"),
            (0, 1, "3 queries: bound and rank of every page"),
            (1, 2, "4 table of pages, in GPU memory"),
            (2, 3, "5 read the selected pages"),
            (3, 2, "6 keys and values, slot by slot"),
            (2, 0, "7 softmax rescaled page by page; a head with a lost page is NaN, counted"),
        ],
    ),
    "path-layers": sequence(
        "Layers of a model that stream",
        [("user", "Program"), ("library", "LayerLoader"), ("memory", "GPU memory, a budget"), ("device", "Drive")],
        [
            (0, 1, "1 layer k, please"),
            (1, 3, "2 read layer k + 1: by the GPU, or by host threads"),
            (3, 2, "3 bytes of layer k + 1"),
            (1, 2, "4 hash the chunks of layer k (manifest)"),
            (1, 0, "5 an event: the stream waits for layer k"),
            (0, 2, "6 compute with layer k"),
            (0, 1, "7 return the slot; layer k + 2 may be read into it"),
        ],
    ),
}


def text(x, y, line, bold=False, size=12, anchor="start"):
    weight = ' font-weight="bold"' if bold else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'  <text x="{x}" y="{y}" font-size="{size}"{weight}{where}>{escape(line)}</text>'


def draw(title, width, height, boxes, arrows):
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="Helvetica, Arial, sans-serif" fill="#1c2733">',
        f"  <title>{escape(title)}</title>",
        '  <defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#35485b"/></marker></defs>',
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for left, top, wide, high, kind, lines in boxes:
        fill, stroke = KINDS[kind]
        out.append(
            f'  <rect x="{left}" y="{top}" width="{wide}" height="{high}" rx="6" fill="{fill}" stroke="{stroke}"/>'
        )
        for number, line in enumerate(lines):
            out.append(
                text(left + 10, top + 20 + 18 * number, line, bold=number == 0, size=13 if number == 0 else 12)
            )
    for x1, y1, x2, y2, label in arrows:
        if label is None:
            out.append(f'  <line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#c3ccd6" stroke-dasharray="3 4"/>')
            continue
        out.append(
            f'  <line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#35485b" stroke-width="1.5" '
            'marker-end="url(#a)"/>'
        )
        if label:
            middle = (y1 + y2) // 2
            if y1 == y2:
                out.append(text((x1 + x2) // 2, middle - 6, label, size=11, anchor="middle"))
            else:
                out.append(text((x1 + x2) // 2 + 6, middle + 4, label, size=11))
    return "\n".join(out + ["</svg>", ""])


def main():
    folder = pathlib.Path(__file__).parent
    check = sys.argv[1:] == ["--check"]
    stale = []
    for name, figure in FIGURES.items():
        path, svg = folder / f"{name}.svg", draw(*figure)
        if check:
            if not path.exists() or path.read_text(encoding="utf-8") != svg:
                stale.append(path.name)
        else:
            path.write_text(svg, encoding="utf-8")
    if stale:
        sys.exit(f"{', '.join(stale)}: not what draw.py draws; run python3 docs/figures/draw.py")


if __name__ == "__main__":
    main()
