#!/usr/bin/env python3
"""Draws the figures of README.md and docs/architecture.md from the tables below.

    python3 docs/figures/draw.py            writes every figure beside this script
    python3 docs/figures/draw.py --check    fails when a committed figure differs from its table

A figure is a size, boxes (left, top, width, height, kind, lines of text) and arrows (from x, y to x, y, label).
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

FIGURES = {
    "overview": ("From your program to the drive", 820, 452, [
        (16, 24, 788, 68, "user", ["Your program", "Python, PyTorch   |   C, C++   |   Rust   |   nvme-gpu, the tool   |   "
                                   "fio   |   your own CUDA C++ or Rust kernel"]),
        (16, 116, 584, 76, "library", ["Library: nvme_host", "stores and tables (rows by id)   |   layers of a model, experts",
                                       "keys and values   |   vector search   |   files of an unmounted ext4"]),
        (624, 116, 180, 76, "gpu", ["Your kernel", "links nvme-core or", "nvme_gpu_device.cuh"]),
        (16, 216, 284, 84, "library", ["nvme-core on CPU threads", "bring-up, recovery, reads of the host;",
                                       "the GPU's queues after a fault"]),
        (324, 216, 480, 84, "gpu", ["nvme-core in GPU kernels (the same source, PTX)", "builds commands, rings doorbells, polls "
                                    "completions;", "every wait has a deadline, every row its status"]),
        (16, 324, 788, 44, "memory", ["Queues in memory: rings, doorbells, completions"]),
        (16, 392, 188, 48, "device", ["sim:", "simulated controller"]),
        (216, 392, 188, 48, "device", ["vfio-user:", "another process"]),
        (416, 392, 188, 48, "device", ["vfio:", "PCIe, behind an IOMMU"]),
        (616, 392, 188, 48, "device", ["kmod:", "PCIe, GPU memory"]),
    ], [
        (300, 92, 300, 116, ""), (714, 92, 714, 116, ""), (150, 192, 150, 216, ""), (460, 192, 460, 216, ""),
        (714, 192, 714, 216, ""), (150, 300, 150, 324, ""), (560, 300, 560, 324, ""),
        (110, 368, 110, 392, ""), (310, 368, 310, 392, ""), (510, 368, 510, 392, ""), (710, 368, 710, 392, ""),
    ]),
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
        out.append(f'  <rect x="{left}" y="{top}" width="{wide}" height="{high}" rx="6" fill="{fill}" stroke="{stroke}"/>')
        for number, line in enumerate(lines):
            out.append(text(left + 10, top + 20 + 18 * number, line, bold=number == 0, size=13 if number == 0 else 12))
    for x1, y1, x2, y2, label in arrows:
        out.append(f'  <line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#35485b" stroke-width="1.5" '
                   'marker-end="url(#a)"/>')
        if label:
            middle = (y1 + y2) // 2
            if y1 == y2:
                out.append(text((x1 + x2) // 2, middle - 5, label, size=11, anchor="middle"))
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
