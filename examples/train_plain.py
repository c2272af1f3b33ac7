"""Train on a text in plain PyTorch: data x context parallel, FSDP2, checkpoints, a model.

    torchrun --nproc_per_node 4 examples/train_plain.py --text book.txt --out run --context 2

A sequence of --length bytes is cut over --context ranks; the other ranks read other sequences.
Weights, gradients and moments are dealt out to all. The same command goes on where it stopped, with
any number of processes.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vort import ByteTokenizer, VortConfig, VortForCausalLM
from vort.distributed import context_parallel
from vort.lab.training.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    whole_weights,
)

options = argparse.ArgumentParser()
options.add_argument("--text", type=Path, required=True)
options.add_argument("--out", type=Path, required=True)
options.add_argument("--context", type=int, default=1)
options.add_argument("--length", type=int, default=8192)
options.add_argument("--rows", type=int, default=1)  # sequences of a step on each group
options.add_argument("--steps", type=int, default=100)
options.add_argument("--save-every", type=int, default=50)
options.add_argument("--width", type=int, default=256)
given = options.parse_args()

kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(device_id=device if kind == "cuda" else None)
shape = (dist.get_world_size() // given.context, given.context)
mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "context"))
everyone = mesh["data", "context"]._flatten("all")

torch.manual_seed(0)  # the same weights everywhere
heads = given.width // 64
model = VortForCausalLM(VortConfig(hidden_size=given.width, num_attention_heads=heads)).to(device)
if given.context > 1:
    context_parallel(model, mesh["context"])
model.gradient_checkpointing_enable({"use_reentrant": False})  # a block at a time
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "cuda" else None
for block in model.model.layers:
    fully_shard(block, mesh=everyone, **({"mp_policy": precision} if precision else {}))
fully_shard(model, mesh=everyone, **({"mp_policy": precision} if precision else {}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# A byte is a token: the file is its own packed, memory-mapped corpus.
tokens = np.memmap(given.text, np.uint8, mode="r")
done, last = 0, latest_checkpoint(given.out)
if last is not None:
    done = load_checkpoint(last, model, optimizer)["step"]

for step in range(done, given.steps):
    # Ranks of a context group draw the same sequences, others draw others.
    draw = np.random.default_rng((step, mesh["data"].get_local_rank()))
    starts = draw.integers(len(tokens) - given.length, size=given.rows)
    rows = np.stack([tokens[at : at + given.length] for at in starts]).astype(np.int64)
    batch = torch.from_numpy(rows).to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    if (step + 1) % given.save_every == 0 or step + 1 == given.steps:
        # Every rank writes its part, by torch.distributed.checkpoint, as safetensors.
        save_checkpoint(given.out, step + 1, model, optimizer, {})

whole = whole_weights(model)
if dist.get_rank() == 0:  # for from_pretrained and `vort generate`
    model.save_pretrained(given.out / "model", state_dict=whole)
    ByteTokenizer().save_pretrained(given.out / "model")
dist.barrier()
dist.destroy_process_group()
