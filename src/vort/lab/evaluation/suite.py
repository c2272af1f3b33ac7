"""Suites of long prompts: every sample by task, length and index, each kept as it is finished."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from vort.files import write_atomically
from vort.lab.evaluation.writing import PIECE, write
from vort.lab.tasks.haystack import Haystack, Kit, MadeSentences, Sample
from vort.lab.tasks.multi_needle import needle_sample
from vort.lab.tasks.question_files import Questions
from vort.lab.tasks.ruler import GENERATED, RULER, RulerPrompts, ruler_score
from vort.lab.tasks.task import stream

__all__ = ["Job", "NeedleSuite", "RulerSuite", "Suite", "read_records", "run_suite", "summary"]

DEPTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RECORDS, SUMMARY = "samples.jsonl", "summary.json"


@dataclass(frozen=True)
class Job:
    """One sample to be made: the same one each time."""

    task: str
    length: int
    index: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What it is found by."""
        return self.task, self.length, self.index


class Suite(ABC):
    """Tasks by name, each with any number of samples of any length.

    Attributes:
        name: of the suite.
        kit: what its texts are made of.
        seed: one seed, one set of samples.
    """

    name: str
    kit: Kit
    seed: int

    @property
    @abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """All tasks."""

    @abstractmethod
    def sample(self, job: Job) -> Sample:
        """The prompt of a job; with the tokens reserved it has exactly the length of the job."""

    @abstractmethod
    def reserve(self, task: str) -> int:
        """Tokens that a model may write."""

    @abstractmethod
    def score(self, task: str, said: str, expected: Sequence[str]) -> float:
        """From 0 to 1."""

    def limit(self, task: str) -> int | None:
        """Samples that a task has at most."""
        return None

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the samples depend on, ready for JSON."""


class RulerSuite(Suite):
    """RULER's thirteen tasks; those with questions only where their files are.

    Args:
        kit: keys, values and words in a model's tokens.
        essays: a haystack of real texts; None: made sentences.
        questions: those of qa_1 and qa_2.
        seed: of all samples.
    """

    name = "ruler"

    def __init__(
        self,
        kit: Kit,
        essays: Haystack | None = None,
        questions: Mapping[str, Questions] | None = None,
        seed: int = 42,
    ) -> None:
        self.kit, self.seed = kit, seed
        self.books = essays is not None
        self.questions = dict(questions or {})
        self.prompts = RulerPrompts(kit, essays, self.questions)

    @property
    def tasks(self) -> tuple[str, ...]:
        """All but those whose questions are missing."""
        return tuple(t for t in RULER if not t.startswith("qa") or t in self.questions)

    def sample(self, job: Job) -> Sample:
        """See `Suite.sample`."""
        rng = stream(self.seed, f"{job.task} {job.length}", "test", job.index)
        return self.prompts.sample(job.task, rng, job.length, self.reserve(job.task), job.index)

    def reserve(self, task: str) -> int:
        """As published."""
        return GENERATED[task]

    def score(self, task: str, said: str, expected: Sequence[str]) -> float:
        """See `ruler_score`."""
        return ruler_score(task, said, expected)

    def limit(self, task: str) -> int | None:
        """Questions that there are."""
        return len(self.questions[task].asked) if task in self.questions else None

    def settings(self) -> dict[str, Any]:
        """See `Suite.settings`."""
        haystack = "books" if self.books else "made sentences"
        return {"suite": self.name, "seed": self.seed, "words": self.kit.source, "essays": haystack}


class NeedleSuite(Suite):
    """Facts at chosen depths: tasks are `one` and `all`, with as many needles as there are.

    Args:
        kit: keys and values in a model's tokens.
        haystack: real texts; None: made sentences.
        needles: facts in a text.
        depths: gone through in turn by the fact that is asked for.
        seed: of all samples.
    """

    name = "multi_needle"

    def __init__(
        self,
        kit: Kit,
        haystack: Haystack | None = None,
        needles: int = 4,
        depths: Sequence[float] = DEPTHS,
        seed: int = 42,
    ) -> None:
        if needles < 1:
            raise ValueError(f"needles must be at least 1, got {needles}")
        self.kit, self.needles, self.depths, self.seed = kit, needles, tuple(depths), seed
        self.books = haystack is not None
        self.haystack = MadeSentences(kit.coder) if haystack is None else haystack

    @property
    def tasks(self) -> tuple[str, ...]:
        """One of the facts is asked for, or all."""
        return ("one", "all")

    def sample(self, job: Job) -> Sample:
        """See `Suite.sample`."""
        rng = stream(self.seed, f"needles {job.task} {job.length}", "test", job.index)
        depths, count = rng.random(self.needles), len(self.depths)
        for turn in range(self.needles if job.task == "all" else 1):
            depths[turn] = self.depths[(job.index + turn * count // self.needles) % count]
        asked: Literal["one", "all"] = "all" if job.task == "all" else "one"
        return needle_sample(
            self.kit,
            self.haystack,
            rng,
            job.length,
            needles=self.needles,
            asked=asked,
            depths=depths.tolist(),
            reserve=self.reserve(job.task),
        )

    def reserve(self, task: str) -> int:
        """Tokens enough for all numbers."""
        return 32 if task == "one" else 32 * self.needles

    def score(self, task: str, said: str, expected: Sequence[str]) -> float:
        """Share of the numbers that are said."""
        return ruler_score("needles", said, expected)

    def settings(self) -> dict[str, Any]:
        """See `Suite.settings`."""
        haystack = "books" if self.books else "made sentences"
        found: dict[str, Any] = {"suite": self.name, "seed": self.seed, "words": self.kit.source}
        return {**found, "haystack": haystack, "needles": self.needles, "depths": [*self.depths]}


def run_suite(
    model: Any,
    suite: Suite,
    folder: Path,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] | None = None,
    samples: int = 500,
    stop: Sequence[int] = (),
    piece: int = PIECE,
    about: Mapping[str, Any] | None = None,
    watch: Callable[[int, int, Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Put a model to all samples that a folder does not have yet, and sum them up.

    FOLDER/samples.jsonl has the settings in its first line and then a line for each sample, written
    when it is finished; FOLDER/summary.json the scores.

    Args:
        model: a causal model of Hugging Face, in evaluation mode.
        suite: which prompts.
        folder: for the results; what it holds of the same settings is not done again.
        lengths: tokens of a prompt and what is written after it.
        tasks: all of the suite's if absent.
        samples: of each task at each length.
        stop: tokens that end an answer.
        piece: tokens of a prompt that are read at a time.
        about: what else results depend on, such as the model.
        watch: told after each sample how many are done, of how many, and the record.
    """
    jobs = [*_jobs(suite, lengths, tasks or suite.tasks, samples)]
    settings = {**suite.settings(), **(about or {})}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORDS
    records = _resumed(path, settings)
    done = {(one["task"], one["length"], one["index"]) for one in records}
    coder = suite.kit.coder
    with path.open("a", encoding="utf-8") as file:
        for number, job in enumerate(jobs, 1):
            if job.key in done:
                continue
            sample = suite.sample(job)
            tokens = write(model, sample.prompt, suite.reserve(job.task), stop=stop, piece=piece)
            said = coder.decode(np.array(_known(tokens, coder.size), dtype=np.int64))
            record = {
                "task": job.task,
                "length": job.length,
                "index": job.index,
                "score": suite.score(job.task, said, sample.expected),
                "said": said,
                "expected": list(sample.expected),
                "depths": list(sample.depths),
            }
            file.write(json.dumps(record) + "\n")
            file.flush()
            records.append(record)
            if watch is not None:
                watch(number, len(jobs), record)
    wanted = {job.key for job in jobs}
    chosen = [one for one in records if (one["task"], one["length"], one["index"]) in wanted]
    found = {**settings, **summary(chosen)}
    write_atomically(folder / SUMMARY, json.dumps(found, indent=1) + "\n")
    return found


def _known(tokens: Sequence[int], size: int) -> list[int]:
    """Tokens that a vocabulary has: models may have more than their tokenizers."""
    return [token for token in tokens if token < size]


def _jobs(
    suite: Suite, lengths: Sequence[int], tasks: Sequence[str], samples: int
) -> Iterator[Job]:
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    for length in lengths:
        for task in tasks:
            limit = suite.limit(task)
            for index in range(samples if limit is None else min(samples, limit)):
                yield Job(task, length, index)


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and samples of a file; a last line that was not finished is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            if not isinstance(one, dict) or (number > 1 and not {"task", "score"} <= one.keys()):
                raise ValueError("no record")
        except ValueError as problem:
            if number == len(lines) > 1:
                break
            raise ValueError(f"{path}:{number} is damaged: {problem}") from problem
        found.append(one)
    return found[0], found[1:]


def _resumed(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples of a file with the same settings, which is there and clean from now on."""
    records: list[dict[str, Any]] = []
    if path.exists() and path.stat().st_size:
        before, records = read_records(path)
        plain = json.loads(json.dumps(settings))
        for name in {**before, **plain}:
            if before.get(name) != plain.get(name):
                raise ValueError(
                    f"{path.parent} holds results with {name} = {before.get(name)!r}, not "
                    f"{plain.get(name)!r}: take another --out"
                )
    text = "".join(json.dumps(one) + "\n" for one in (settings, *records))
    write_atomically(path, text)
    return records


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores by task and length, their averages by length, and by depth where there are depths.

    `all_right` is the share of samples in which nothing is missing.
    """
    scores: dict[str, dict[str, Any]] = {}
    depths: dict[str, dict[str, dict[str, list[float]]]] = {}
    for one in records:
        length = str(one["length"])
        scores.setdefault(one["task"], {}).setdefault(length, []).append(one["score"])
        said = str(one["said"]).lower()
        for depth, answer in zip(one["depths"], one["expected"], strict=False):
            place = depths.setdefault(one["task"], {}).setdefault(length, {})
            place.setdefault(f"{depth:.2f}", []).append(float(answer.lower() in said))
    table = {
        task: {length: _summed(found) for length, found in by_length.items()}
        for task, by_length in scores.items()
    }
    lengths = sorted({length for found in table.values() for length in found}, key=int)
    average = {
        length: fmean(found[length]["score"] for found in table.values() if length in found)
        for length in lengths
    }
    by_depth = {
        task: {
            length: {depth: fmean(found[depth]) for depth in sorted(found)}
            for length, found in by_length.items()
        }
        for task, by_length in depths.items()
    }
    return {"scores": table, "average": average, "depths": by_depth}


def _summed(found: Sequence[float]) -> dict[str, float]:
    count = len(found)
    error = stdev(found) / count**0.5 if count > 1 else 0.0
    right = fmean(float(score == 1.0) for score in found)
    return {"score": fmean(found), "error": error, "all_right": right, "samples": count}
