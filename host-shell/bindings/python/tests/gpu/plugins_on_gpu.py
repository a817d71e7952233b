"""fastsafetensors and checkpoints of torch.distributed on a machine with a GPU: one JSON line for each case, then
`N passed, N failed`.

    python plugins_on_gpu.py [--mib 256] [CASE ...]

Needs the wheel, torch 2.3 or newer, safetensors, and fastsafetensors 0.5 with what it imports; `mke2fs` for files of a
drive. Exit status 0: nothing failed; figures fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

CASES = []


def case(call):
    CASES.append(call)
    return call


def tensors(options, seed=3):
    import torch

    torch.manual_seed(seed)
    rows = options.mib * (1 << 20) // (4 * 4096 * 2)
    found = {f"layers.{layer}.weight": torch.randn(rows, 4096).half() for layer in range(4)}
    found["bias"] = torch.randn(77).to(torch.bfloat16)
    found["odd"] = torch.arange(33, dtype=torch.uint8)
    found["after"] = torch.randn(5, 7)
    return found


def same(found, wanted):
    import torch

    torch.cuda.synchronize()
    for name, tensor in wanted.items():
        assert found[name].is_cuda and found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor), name


def loaded(path, wanted, **words):
    """Tensors by fastsafetensors on the GPU, compared; seconds of the load."""
    import fastsafetensors

    begin = time.perf_counter()
    loader = fastsafetensors.SafeTensorsFileLoader(None, device="cuda:0", nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device(**words)
    seconds = time.perf_counter() - begin
    same({name: buffers.get_tensor(name) for name in wanted}, wanted)
    buffers.close()
    loader.close()
    return seconds


def image(folder, mib):
    """An ext4 with the files of a folder."""
    program = shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert program, "mke2fs is not here: install e2fsprogs"
    path = f"{folder}.img"
    subprocess.run([program, "-q", "-F", "-t", "ext4", "-d", folder, path, f"{mib}M"], check=True)
    return path


@case
def files_by_fastsafetensors(options, folder):
    """A file of this machine, whole and while it is read, beside fastsafetensors' own copier."""
    import nvme_gpu.fastsafetensors as plugin
    from safetensors.torch import save_file

    wanted, path = tensors(options), f"{folder}/model.safetensors"
    save_file(wanted, path)
    rates = {}
    for name, words in (("host", {}), ("cufile", {"gds": "auto"})):
        plugin.register(**words)
        try:
            loaded(path, wanted)
            rates[name] = loaded(path, wanted)
            rates[f"{name}_inflight"] = loaded(path, wanted, allow_inflight=True)
        finally:
            plugin.unregister()
    try:
        loaded(path, wanted)
        rates["theirs"] = loaded(path, wanted)
    except Exception as error:
        rates["theirs"] = f"{type(error).__name__}: {error}"
    return {"bytes": os.path.getsize(path), "seconds": rates}


@case
def a_drive_by_fastsafetensors(options, folder):
    """A file in the ext4 of a drive, which the GPU reads by itself; and an error of the drive."""
    import nvme_gpu
    import nvme_gpu.fastsafetensors as plugin
    from safetensors.torch import save_file

    wanted = tensors(options)
    os.mkdir(f"{folder}/files")
    save_file(wanted, f"{folder}/files/model.safetensors")
    device = f"sim:{image(f'{folder}/files', options.mib + 64)}?queues=32&threads=4"
    with nvme_gpu.Volume(device, gpu=0) as volume:
        plugin.register({"/drive": volume})
        try:
            seconds = [loaded("/drive/model.safetensors", wanted) for _ in range(2)]
            inflight = loaded("/drive/model.safetensors", wanted, allow_inflight=True)
        finally:
            plugin.unregister()
    failed = None
    with nvme_gpu.Volume(f"{device}&fault=status:0x281@op=read,nth=200-1000000000", gpu=0) as volume:
        plugin.register({"/drive": volume})
        try:
            loaded("/drive/model.safetensors", wanted)
        except nvme_gpu.Status as error:
            failed = str(error)
        finally:
            plugin.unregister()
    assert failed, "a drive that fails gave tensors"
    return {"seconds": seconds, "inflight": inflight, "error": failed}


@case
def a_checkpoint_of_torch(options, folder):
    """dcp.load into tensors of the GPU, from a folder and from a drive."""
    import torch
    import torch.distributed.checkpoint as dcp

    import nvme_gpu
    from nvme_gpu.dcp import DcpReader

    wanted = tensors(options)
    os.mkdir(f"{folder}/checkpoint")
    dcp.save(dict(wanted), checkpoint_id=f"{folder}/checkpoint")

    def load(reader):
        state = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in wanted.items()}
        begin = time.perf_counter()
        dcp.load(state, storage_reader=reader)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        same(state, wanted)
        return seconds

    found = {"folder": load(DcpReader(f"{folder}/checkpoint"))}
    with nvme_gpu.Volume(f"sim:{image(f'{folder}/checkpoint', options.mib + 64)}") as volume:
        found["drive"] = load(DcpReader("/", volume))
    found["theirs"] = load(dcp.FileSystemReader(f"{folder}/checkpoint"))
    return {"torch": torch.__version__, "seconds": found}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("cases", nargs="*", help="words that names of cases contain")
    options = parser.parse_args()
    passed = failed = 0
    for call in CASES:
        if options.cases and not any(word in call.__name__ for word in options.cases):
            continue
        line = {"case": call.__name__}
        try:
            with tempfile.TemporaryDirectory() as folder:
                line["result"] = call(options, folder)
            passed += 1
        except Exception as error:
            failed += 1
            line["failed"] = f"{type(error).__name__}: {error}"
            line["trace"] = traceback.format_exc().splitlines()[-6:]
        print(json.dumps(line), flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
