"""Context parallel on a GPU, by the kernels: run by hand, it needs a device and a minute.

    python tests/distributed/check_gpu.py [--device cpu] [--only padded]

First one process in an NCCL group of its own: the model with a cut that is none gives the loss and
gradients of the model without, in bf16 and float32. Then two processes on the same device, which
talk through the host since NCCL has no two ranks on one: rows, packed and padded sequences cut in
two give what one process gives. Says how far off each is, and fails beyond rounding.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

from vort.distributed import context_parallel, exchange  # noqa: E402
from vort.models import VortConfig, VortForCausalLM  # noqa: E402

# Relative to the largest gradient of a parameter. In bf16 two orders of the same sums differ by
# this much: the part of a check that says more is float32.
LIMITS = {torch.bfloat16: 6e-2, torch.float32: 2e-3}
LENGTH = 1536


def model_of(dtype: torch.dtype, device: str, memory: str) -> VortForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = VortConfig(**sizes, vocab_size=512, memory=memory, output_gate=True, horizon=4096)
    return VortForCausalLM(config).to(device, dtype).train()


def batch_of(kind: str, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(512, (1 if kind == "packed" else 2, LENGTH), generator=generator)
    labels, more = rows.clone(), {}
    if kind == "packed":
        bounds = [0, 100, 700, 1000, LENGTH]
        labels[0, bounds[:-1]] = -100
        more["cu_seqlens"] = torch.tensor(bounds)
    if kind == "padded":
        mask = torch.arange(LENGTH) < torch.tensor([LENGTH, 1100])[:, None]
        labels[~mask] = -100
        more["attention_mask"] = mask.long()
    found = {"input_ids": rows, "labels": labels, **more}
    return {name: x.to(device) for name, x in found.items()}


def step(model: VortForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[float, Any]:
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
    return float(loss.detach()), gradients


def compare(name: str, found: Any, expected: Any, dtype: torch.dtype) -> bool:
    worst, where = 0.0, ""
    for key, gradient in expected[1].items():
        scale = float(gradient.abs().max()) + 1e-12
        off = float((found[1][key] - gradient).abs().max()) / scale
        worst, where = max((worst, where), (off, key))
    loss = abs(found[0] - expected[0])
    good = worst < LIMITS[dtype] and loss < LIMITS[dtype] and found[1].keys() == expected[1].keys()
    kind = str(dtype).removeprefix("torch.")
    print(f"{name:34} {kind:9} loss {loss:.1e}  gradients {worst:.1e} {where}", flush=True)
    return good


def through_host() -> None:
    """Have ranks talk by way of the host's memory, which gloo needs for what they do here."""
    shift, gather = exchange._shift, exchange._gather

    def shift_on_host(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = shift(x.cpu(), *args, **options)
        return None if found is None else found.to(x.device)

    def gather_on_host(tensors: Any, *args: Any) -> Any:
        device = tensors[0].device
        rows = gather([x.cpu() for x in tensors], *args)
        return [[x.to(device) for x in row] for row in rows]

    exchange._shift, exchange._gather = shift_on_host, gather_on_host


def half(rank: int, file: str, device: str, only: str, answers: Any) -> None:
    """One of two ranks: their loss, and the mean of their gradients."""
    torch.set_num_threads(1)
    through_host()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1])
    good = True
    for memory, kind, dtype in CASES:
        if only not in f"{memory}, {kind}":
            continue
        model, batch = model_of(dtype, device, memory), batch_of(kind, device)
        expected = step(model, batch) if rank == 0 else None
        model.zero_grad()
        found = step(context_parallel(model, mesh), batch)
        for x in found[1].values():
            total = x.cpu()
            dist.all_reduce(total)
            x.copy_(total / 2)
        if rank == 0:
            good &= compare(f"two ranks, {memory}, {kind}", found, expected, dtype)
    dist.barrier()
    answers.put(good)


CASES = [
    (memory, kind, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for memory, kind in (("vort", "rows"), ("vort", "packed"), ("vort", "padded"))
] + [("mixture", "packed", torch.float32), ("exponential", "rows", torch.float32)]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda")
    options.add_argument("--only", default="", help="of two ranks, cases with this in their name")
    given = options.parse_args()
    device, began, good = given.device, time.perf_counter(), True
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    whose = torch.device(device, 0) if device == "cuda" else None
    backend = "gloo" if whose is None else "nccl"
    dist.init_process_group(backend, rank=0, world_size=1, device_id=whose)
    mesh = DeviceMesh(device, [0])
    for dtype in LIMITS:
        model, batch = model_of(dtype, device, "vort"), batch_of("packed", device)
        expected = step(model, batch)
        model.zero_grad()
        good &= compare("one rank", step(context_parallel(model, mesh), batch), expected, dtype)
    dist.destroy_process_group()
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        shared = (str(Path(folder) / "meeting"), device, given.only, answers)
        ranks = [context.Process(target=half, args=(rank, *shared)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    done = [process.exitcode for process in ranks] == [0, 0]
    good = good and done and all(answers.get() for _ in ranks)
    print(f"{'good' if good else 'NOT GOOD'}, {time.perf_counter() - began:.0f} s")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
