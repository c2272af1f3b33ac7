"""Suites of long prompts: every sample by task, length and index, each kept as it is finished."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from vort.files import write_atomically
from vort.lab.evaluation.writing import PIECE, write
from vort.lab.tasks.haystack import Haystack, Kit, MadeSentences, Sample
from vort.lab.tasks.multi_needle import needle_sample
from vort.lab.tasks.question_files import Questions, read_text
from vort.lab.tasks.ruler import GENERATED, RULER, RulerPrompts, ruler_score, split_prompt
from vort.lab.tasks.task import Integers, stream

__all__ = [
    "Job",
    "NeedleSuite",
    "RulerSuite",
    "Suite",
    "read_records",
    "run_suite",
    "summary",
    "write_prompts",
]

DEPTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RECORDS, SUMMARY, PROMPTS = "samples.jsonl", "summary.json", "prompts.jsonl"


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
        """The prompt of a job; with the room after it it has exactly the length of the job."""

    @abstractmethod
    def reserve(self, task: str) -> int:
        """Tokens that a model may write."""

    def room(self, task: str) -> int:
        """Tokens that are left for what follows a sample: what a chat puts there, and an answer."""
        return len(self.kit.coder.end) + self.reserve(task)

    def prompt(self, task: str, sample: Sample) -> Integers:
        """What a model reads: in a chat the turn ends before the words that an answer begins with.

        The model has said those already, as in lm_eval.
        """
        coder, tokens = self.kit.coder, sample.prompt
        if not len(coder.end):
            return tokens
        begins = self.split(task, coder.decode(tokens))[1]
        for said in range(len(tokens), 0, -1):
            if coder.decode(tokens[said:]).strip() == begins:
                return np.concatenate([tokens[:said], coder.end, tokens[said:]])
        raise ValueError(f"{task}: the tokenizer does not give back how an answer begins")

    @abstractmethod
    def score(self, task: str, said: str, expected: Sequence[str]) -> float:
        """From 0 to 1."""

    def limit(self, task: str) -> int | None:
        """Samples that a task has at most."""
        return None

    def check(self, task: str, length: int, samples: int) -> None:
        """Raise where one of the first samples cannot be made so short or so long."""
        try:
            self.sample(Job(task, length, 0))
        except ValueError as problem:
            raise ValueError(f"{task} of {length:,} tokens: {problem}") from problem

    def split(self, task: str, text: str) -> tuple[str, str]:
        """A prompt, and the words of it that an answer begins with."""
        return text, ""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the samples depend on, ready for JSON."""

    def _shared_settings(self) -> dict[str, Any]:
        found = {"suite": self.name, "seed": self.seed, "words": self.kit.source}
        begin, end = self.kit.coder.begin, self.kit.coder.end
        known = sha256(f"{begin.tolist()} {end.tolist()}".encode()).hexdigest()[:12]
        return {**found, "chat": known} if len(end) else found

    def files(self) -> dict[str, str]:
        """What files the samples of a task come from, by a hash, where they come from any."""
        return {}


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
        self.kit, self.seed, self.essays = kit, seed, essays
        self.questions = dict(questions or {})
        self.prompts = RulerPrompts(kit, essays, self.questions)

    @property
    def tasks(self) -> tuple[str, ...]:
        """All but those whose questions are missing."""
        return tuple(t for t in RULER if not t.startswith("qa") or t in self.questions)

    def sample(self, job: Job) -> Sample:
        """See `Suite.sample`."""
        rng = stream(self.seed, f"{job.task} {job.length}", "test", job.index)
        return self.prompts.sample(job.task, rng, job.length, self.room(job.task), job.index)

    def reserve(self, task: str) -> int:
        """As published."""
        return GENERATED[task]

    def score(self, task: str, said: str, expected: Sequence[str]) -> float:
        """See `ruler_score`."""
        return ruler_score(task, said, expected)

    def split(self, task: str, text: str) -> tuple[str, str]:
        """See `split_prompt`."""
        return split_prompt(task, text)

    def limit(self, task: str) -> int | None:
        """Questions that there are."""
        return len(self.questions[task].asked) if task in self.questions else None

    def check(self, task: str, length: int, samples: int) -> None:
        """See `Suite.check`; of questions, all have to fit with their documents."""
        if task in self.questions:
            count = min(samples, len(self.questions[task].asked))
            least = self.prompts.least(task, count) + self.room(task)
            if length < least:
                raise ValueError(
                    f"{task} of {length:,} tokens: length must be at least {least:,} for the "
                    f"first {count} questions with their documents"
                )
        super().check(task, length, samples)

    def settings(self) -> dict[str, Any]:
        """See `Suite.settings`."""
        return {**self._shared_settings(), **_known_by("essays", self.essays)}

    def files(self) -> dict[str, str]:
        """See `Suite.files`."""
        return {task: questions.digest for task, questions in sorted(self.questions.items())}


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
        if not depths or not all(0 <= depth <= 1 for depth in depths):
            raise ValueError(f"depths must lie in [0, 1], got {[*depths]}")
        self.kit, self.needles, self.depths, self.seed = kit, needles, tuple(depths), seed
        self.books = haystack
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
            reserve=self.room(job.task),
        )

    def reserve(self, task: str) -> int:
        """Tokens enough for all numbers."""
        return 32 if task == "one" else 32 * self.needles

    def score(self, task: str, said: str, expected: Sequence[str]) -> float:
        """Share of the numbers that are said."""
        return ruler_score("needles", said, expected)

    def settings(self) -> dict[str, Any]:
        """See `Suite.settings`."""
        found = {**self._shared_settings(), **_known_by("haystack", self.books)}
        return {**found, "needles": self.needles, "depths": [*self.depths]}


def _known_by(name: str, haystack: Haystack | None) -> dict[str, str]:
    """What a haystack is, for settings: of texts, which ones."""
    if haystack is None:
        return {name: "made sentences"}
    return {name: "books", f"{name}_digest": haystack.digest}


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
    jobs = _jobs(suite, lengths, tasks or suite.tasks, samples)
    settings = {**suite.settings(), **(about or {})}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORDS
    records = _resumed(path, settings, suite.files())
    done = {(one["task"], one["length"], one["index"]) for one in records}
    coder = suite.kit.coder
    with path.open("a", encoding="utf-8") as file:
        for number, job in enumerate(jobs, 1):
            if job.key in done:
                continue
            sample = _made(suite, job)
            prompt = suite.prompt(job.task, sample)
            tokens = write(model, prompt, suite.reserve(job.task), stop=stop, piece=piece)
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


def write_prompts(
    suite: Suite,
    folder: Path,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] | None = None,
    samples: int = 500,
) -> Path:
    """All prompts as documents of lm_eval's ruler tasks, a line each: FOLDER/prompts.jsonl."""
    if len(suite.kit.coder.end):
        raise ValueError("prompts are written without a chat template: lm_eval puts its own")
    jobs = _jobs(suite, lengths, tasks or suite.tasks, samples)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROMPTS
    with path.open("w", encoding="utf-8") as file:
        for job in jobs:
            sample = _made(suite, job)
            read, begins = suite.split(job.task, suite.kit.coder.decode(sample.prompt))
            document = {
                "task": job.task,
                "index": job.index,
                "input": read,
                "outputs": list(sample.expected),
                "length": len(sample.prompt) + suite.reserve(job.task),
                "max_length": job.length,
                "gen_prefix": begins,
            }
            file.write(json.dumps(document) + "\n")
    return path


def _known(tokens: Sequence[int], size: int) -> list[int]:
    """Tokens that a vocabulary has: models may have more than their tokenizers."""
    return [token for token in tokens if token < size]


def _jobs(suite: Suite, lengths: Sequence[int], tasks: Sequence[str], samples: int) -> list[Job]:
    """Every sample once, all of them sure to be there: better said now than after hours."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    found = []
    for length in dict.fromkeys(lengths):
        for task in dict.fromkeys(tasks):
            suite.check(task, length, samples)
            limit = suite.limit(task)
            count = samples if limit is None else min(samples, limit)
            found += [Job(task, length, index) for index in range(count)]
    return found


def _made(suite: Suite, job: Job) -> Sample:
    """A sample with something to be found: nothing is in every text."""
    sample = suite.sample(job)
    if not all(each.strip() for each in sample.expected):
        raise ValueError(
            f"{job.task}: an answer is empty as the tokenizer writes it, {sample.expected}"
        )
    return sample


_RECORD = {"task", "length", "index", "score", "said", "expected", "depths"}


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and samples of a file; a last line that was not finished is left out."""
    lines = read_text(path).splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            if not isinstance(one, dict) or (number > 1 and not one.keys() >= _RECORD):
                raise ValueError("no record")
        except ValueError as problem:
            if number == len(lines) > 1:
                break
            raise ValueError(f"{path}:{number} is damaged: {problem}") from problem
        found.append(one)
    return found[0], found[1:]


def _resumed(path: Path, settings: dict[str, Any], files: dict[str, str]) -> list[dict[str, Any]]:
    """Samples of a file with the same settings, which is there and clean from now on.

    files: of tasks, of which a file of samples may know others.
    """
    records: list[dict[str, Any]] = []
    if path.exists() and (not path.is_file() or path.stat().st_size):
        before, records = read_records(path)
        known = before.pop("files", {})
        plain = json.loads(json.dumps(settings))
        changed = [
            *((name, before.get(name), plain.get(name)) for name in {**before, **plain}),
            *((f"files of {task}", known[task], files[task]) for task in known if task in files),
        ]
        # Where nothing was finished, nothing is of other settings.
        for name, then, now in changed if records else ():
            if then != now:
                raise ValueError(
                    f"{path.parent} holds results with {name} = {then!r}, not {now!r}: "
                    "take another --out"
                )
        files = {**known, **files} if records else files
    first = {**settings, "files": files} if files else settings
    text = "".join(json.dumps(one) + "\n" for one in (first, *records))
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
