"""What ranks do in the tests: train a small model in one of several ways."""

import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.models.cases import config_of, tokens
from vort.distributed import context_parallel, part_of
from vort.models import VortForCausalLM

STEPS = 20
Batch = dict[str, Tensor]
BOUNDS = [0, 7, 30, 33, 61]


def batch_of(kind: str) -> Batch:
    """Rows of an odd length, the same padded, or sequences of all lengths packed into one row."""
    if kind == "packed":
        rows = tokens(1, BOUNDS[-1])
        labels = rows.clone()
        labels[0, BOUNDS[:-1]] = -100
        return {"input_ids": rows, "labels": labels, "cu_seqlens": torch.tensor(BOUNDS)}
    rows = tokens(4, 61)
    batch = {"input_ids": rows, "labels": rows.clone()}
    if kind == "padded":
        mask = torch.arange(61) < torch.tensor([61, 13, 40, 57])[:, None]
        batch["attention_mask"] = mask.long()
        batch["labels"][~mask] = -100
    return batch


def scored(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def model_of(memory: str, **changes: Any) -> VortForCausalLM:
    torch.manual_seed(0)
    return VortForCausalLM(config_of(memory, **changes)).train()


def share(batch: Batch, mesh: DeviceMesh) -> Batch:
    """The rows that fall to a rank of a mesh; all of packed ones."""
    if "cu_seqlens" in batch:
        return batch
    rows = len(batch["input_ids"]) // mesh.size()
    mine = slice(mesh.get_local_rank() * rows, (mesh.get_local_rank() + 1) * rows)
    return {name: x[mine] for name, x in batch.items()}


def train(model: nn.Module, batch: Batch, steps: int, scale: float = 1.0, total: Any = None) -> Any:
    """Losses of some steps, and the gradients of the first."""
    # Gated linear attention multiplies rounding: at 1e-3 one process in float32 is off by 1e-4
    # from itself in float64 after 20 steps.
    base = getattr(model, "module", model)
    rate = 2e-4 if base.config.memory.startswith("gla") else 3e-3
    # An eps above rounding: else gradients that are zero but for it move weights by a whole step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-5, foreach=False)
    losses, first = [], {}
    for step in range(steps):
        loss = model(**batch, num_items_in_batch=total).loss * scale
        loss.backward()
        if step == 0:
            first = {
                name.removeprefix("module."): whole(x.grad) for name, x in model.named_parameters()
            }
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def whole(x: Tensor | None) -> Any:
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return None if x is None else x.detach().numpy().copy()


def alone(memory: str, kind: str, steps: int = STEPS, **changes: Any) -> Any:
    return train(model_of(memory, **changes), batch_of(kind), steps)


def shard(model: VortForCausalLM, mesh: DeviceMesh) -> VortForCausalLM:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def together(
    rank: int, way: str, memory: str, kind: str, steps: int = STEPS, changes: Any = None
) -> Any:
    """What `alone` returns, by several ranks."""
    model, batch = model_of(memory, **(changes or {})), batch_of(kind)
    ranks, total = dist.get_world_size(), scored(batch)
    data = ranks if way in ("ddp", "fsdp") else 2 if "data" in way else 1
    mesh = init_device_mesh("cpu", (data, ranks // data), mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("all")
    if "checkpointed" in way:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "compiled" in way:
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    if ranks // data > 1:
        context_parallel(model, mesh["context"])
    batch = share(batch, mesh["data"])
    wrapped: nn.Module = shard(model, everyone) if "fsdp" in way else DistributedDataParallel(model)
    losses, first = train(wrapped, batch, steps, scale=data, total=total)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return (mean / ranks).tolist(), first


def sent(rank: int, lengths: tuple[int, ...], memory: str) -> list[dict[str, int]]:
    """Bytes that a forward and a backward pass of one layer and rank hand to others, by kind."""
    counted: dict[str, int] = {}
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, exchange = getattr(dist, name), dist.batch_isend_irecv

    def count_gather(found: Tensor, given: Tensor, **options: Any) -> Any:
        counted["states"] += given.nbytes
        counted["calls"] += 1
        return gather(found, given, **options)

    def count_exchange(calls: Any) -> Any:
        counted["halo"] += sum(call.tensor.nbytes for call in calls if call.op is dist.isend)
        counted["calls"] += 1
        return exchange(calls)

    setattr(dist, name, count_gather)
    dist.batch_isend_irecv = count_exchange
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = context_parallel(model_of(memory, num_hidden_layers=1), mesh)
    found = []
    for length in lengths:
        counted |= {"halo": 0, "states": 0, "calls": 0}
        rows = tokens(2, length)
        model(rows, labels=rows).loss.backward()
        found.append(dict(counted))
    return found


def calls() -> dict[str, dict[str, Any]]:
    """Ways to ask for the same, but for labels beside input_ids and a whole answer by name."""
    rows, packed = batch_of("rows"), batch_of("packed")
    ids, bounds = rows["input_ids"], packed.pop("cu_seqlens").int()
    longest = int(bounds.diff().max())
    return {
        "shifted": {"input_ids": ids, "shift_labels": ids.roll(-1, 1)},
        "flash": {
            **packed,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        },
        "tuple": {**rows, "return_dict": False},
        "kept": {**rows, "logits_to_keep": 5},
        "kept_tuple": {**rows, "logits_to_keep": 5, "return_dict": False},
    }


def answer(model: nn.Module, call: dict[str, Any]) -> Any:
    """Loss, the logits if some were asked for, and gradients."""
    model.zero_grad()
    found = model(**call)
    found[0].backward()
    grads = {name: x.grad for name, x in model.named_parameters()}
    return float(found[0].detach()), found[1].detach(), grads


def answered(rank: int) -> Any:
    """`answer` to all `calls`, gradients averaged."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, found = context_parallel(model_of("vort"), mesh), {}
    for name, call in calls().items():
        loss, logits, grads = answer(model, call)
        for x in grads.values():
            dist.all_reduce(x)
            x /= dist.get_world_size()
        found[name] = loss, logits.numpy(), {key: whole(x) for key, x in grads.items()}
    return found


def refused(rank: int) -> list[str]:
    """What context parallel says no to."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    said = []

    def refuses(call: Any) -> None:
        try:
            call()
        except ValueError as problem:
            said.append(str(problem))

    refuses(lambda: context_parallel(model_of("vort"), mesh))
    refuses(lambda: context_parallel(model_of("softmax"), mesh["context"]))
    model = context_parallel(model_of("vort"), mesh["context"])
    refuses(lambda: model(tokens(1, 15)))
    refuses(lambda: model(**batch_of("packed"), use_cache=True))
    refuses(lambda: model(**batch_of("padded"), logits_to_keep=5))
    refuses(lambda: model(**batch_of("rows"), logits_to_keep=torch.tensor([60])))
    base = context_parallel(model_of("vort").model, mesh["context"])
    refuses(lambda: base(tokens(2, 61), asked=torch.tensor([3, 40])))
    return said


def generated(rank: int, memory: str, length: int) -> tuple[list[int], Any]:
    """Tokens after a prompt that is read in parts, and the logits of its parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = context_parallel(model_of(memory).eval(), mesh)
    prompt = tokens(2, length)
    found = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        logits = model(prompt, use_cache=False).logits
    return found.tolist(), (part_of(length, mesh), logits.numpy())


def over_heads(rank: int, folder: str, kind: str, steps: int = STEPS) -> Any:
    """What `alone` returns, by a saved model whose heads are dealt out to the ranks."""
    from transformers.distributed import DistributedConfig

    ranks = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = VortForCausalLM.from_pretrained(folder, distributed_config=ranks).train()
    cut = sum(isinstance(x, DTensor) for x in model.parameters())
    found = train(model, batch_of(kind), steps)
    model.eval()
    prompt = tokens(2, 20)
    text = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    return found, cut, text.tolist()


def as_launched() -> None:
    """The environment that a launcher gives its processes; the group is there already."""
    ranks = str(dist.get_world_size())
    os.environ.update(ACCELERATE_USE_CPU="1", LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1")


def trained(
    rank: int, folder: str, shard: bool, first: str | None = None, changes: Any = None
) -> Any:
    """Losses of a run of six steps with a checkpoint every three, from a checkpoint if given."""
    as_launched()
    if first is not None and rank == 0:
        shutil.copytree(first, Path(folder) / Path(first).name)
    dist.barrier()
    return run_of(folder, shard, **(changes or {}))


def learned_of_uneven(rank: int, pieces: int) -> tuple[list[float], list[Any]]:
    """Losses and weights of a run whose sequences ask at unequally many positions."""
    from tests.lab.training.tiny import UNEVEN, quick, tiny
    from vort.lab.training import train as train_model

    as_launched()
    model = tiny(dropout=0.0)
    options = {"accumulation": pieces, "eps": 1e-3, "log_every": 1}
    result = train_model(model, UNEVEN, quick(**options))
    losses = [entry["loss"] for entry in result.history if "loss" in entry]
    return losses, [x.detach().numpy() for x in model.parameters()]


def run_of(folder: str, shard: bool = False, **changes: Any) -> Any:
    from tests.lab.training.tiny import TASK, quick
    from vort.lab.training import train as train_model

    options = {"steps": 6, "learning_rate": 3e-3, "eps": 1e-5, "log_every": 1, "shard": shard}
    options |= {"checkpoint_every": 3, "keep_checkpoints": 2, "evaluation_sequences": 19}
    model = model_of(changes.pop("memory", "vort"), vocab_size=TASK.vocab_size, **changes)
    result = train_model(model, TASK, quick(**options), directory=folder, resume=True)
    return [entry["loss"] for entry in result.history if "loss" in entry], result.test


def broken(rank: int) -> str:
    """What a run says of which one rank's loss is no number at its third step."""
    from tests.lab.training.tiny import TASK, quick
    from vort.lab.training import train as train_model

    as_launched()
    calls = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        loss = model(batch["input_ids"]).logits.float().logsumexp(-1).mean()
        return loss * float("nan") if rank == 1 and len(calls) == 3 else loss

    try:
        train_model(
            model_of("vort", vocab_size=TASK.vocab_size), TASK, quick(), objective=objective
        )
    except FloatingPointError as problem:
        return str(problem)
    return "nothing"


def command(rank: int, out: str, arguments: list[str], fault: str = "") -> Any:
    """Exit code and standard error of `vort train`, as one of several processes."""
    from vort.cli import app

    as_launched()
    os.environ["TERM"] = "dumb"
    os.chdir(Path(out).parent)
    error = Path(out).parent / f"error-{rank}"
    with error.open("w") as stream:
        os.dup2(stream.fileno(), 2)
        sys.stderr = os.fdopen(2, "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if fault == "kill" and rank == 1:
        threading.Thread(target=_die_after, args=(Path(out), 4), daemon=True).start()
    if fault == "large":
        from vort.lab.tasks import packed

        packed.LARGE = 1000
    if fault == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        # Half of a module's bytecode would be left to all that come after.
        sys.dont_write_bytecode = True
    try:
        app(["train", "--out", out, *arguments], standalone_mode=True)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stderr.flush()
    return code, error.read_text()


def _die_after(out: Path, step: int) -> None:
    while not (out / f"step-{step:08d}").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
