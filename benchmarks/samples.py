"""Samples of 131,072 tokens made in a second, on one core, of each task that has them.

python benchmarks/samples.py
"""

from time import process_time

from vort.lab.tasks import MultiNeedle, Ruler
from vort.lab.tasks.haystack import HaystackTask
from vort.lab.tasks.ruler import SYNTHETIC

LENGTH, SAMPLES = 131_072, 20


def rate(task: HaystackTask) -> float:
    task.batch("test", [0])  # what is made once
    begin = process_time()
    for index in range(SAMPLES):
        task.batch("test", [index])
    return SAMPLES / (process_time() - begin)


def main() -> None:
    print(f"{'task':18}{'bytes':>8}{'words':>8}   samples of {LENGTH:,} tokens a second")
    for kind in ("multi_needle", *SYNTHETIC):
        found = []
        for tokens in ("bytes", "words"):
            needles = kind == "multi_needle"
            task: HaystackTask = (
                MultiNeedle(length=LENGTH, tokens=tokens, needles=4, asked="all")
                if needles
                else Ruler(length=LENGTH, tokens=tokens, kind=kind)
            )
            found.append(rate(task))
        print(f"{kind:18}{found[0]:8.0f}{found[1]:8.0f}")


if __name__ == "__main__":
    main()
