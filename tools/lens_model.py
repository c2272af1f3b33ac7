"""Train a small byte model for a few minutes, to look at through `vort lens`.

python tools/lens_model.py BOOKS --minutes 7 --out lens-model
"""

import argparse
import time
from pathlib import Path

import torch

from vort.models import ByteTokenizer, VortConfig, VortForCausalLM

LENGTH, BATCH, RATE = 1024, 4, 4e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("books", type=Path, help="folder of .txt files")
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--out", type=Path, default=Path("lens-model"))
    given = parser.parse_args()
    torch.manual_seed(0)
    text = b"".join(path.read_bytes()[2000:600_000] for path in sorted(given.books.glob("*.txt")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = VortForCausalLM(VortConfig(**sizes, horizon=4096, sliding_window=32))
    train(model, data, 60 * given.minutes)
    model.eval().save_pretrained(given.out)
    ByteTokenizer().save_pretrained(given.out)


def train(model: VortForCausalLM, data: torch.Tensor, seconds: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    start, step = time.monotonic(), 0
    while (spent := (time.monotonic() - start) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 30) * max(0.05, 1 - spent)
        places = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([data[place : place + LENGTH] for place in places]).long()
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            bits = loss.item() / torch.log(torch.tensor(2.0)).item()
            print(f"step {step}, {bits:.3f} bits, {spent:.0%}", flush=True)


if __name__ == "__main__":
    main()
