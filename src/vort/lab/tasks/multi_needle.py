"""Facts at chosen depths of a long text, asked for at its end: one of them, or all."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

import numpy as np

from vort.lab.tasks.haystack import (
    Answer,
    Haystack,
    HaystackTask,
    Kit,
    MadeSentences,
    Sample,
    hide,
)
from vort.lab.tasks.pieces import ByteCoder, Coder, WordCoder
from vort.lab.tasks.task import Integers, Split
from vort.names import check_choice

__all__ = ["MultiNeedle", "needle_sample"]

FACT = " The special magic number for"
_TEXTS = (FACT, " is. What? are numbers, and\n", "\nWhat numbers are mentioned in the text")


@lru_cache(maxsize=8)
def _coder(tokens: str, words: int, values: int) -> Coder:
    texts = (*_TEXTS, *MadeSentences.TEXTS)
    return ByteCoder() if tokens == "bytes" else WordCoder(words, texts, values)


def needle_sample(
    kit: Kit,
    haystack: Haystack,
    rng: np.random.Generator,
    length: int,
    *,
    needles: int,
    asked: Literal["one", "all"],
    depths: Sequence[float],
    reserve: int | None = None,
) -> Sample:
    """Facts "The special magic number for KEY is VALUE." in a haystack, and a question.

    Args:
        kit: what keys and values are made of.
        haystack: what they are hidden in.
        rng: all that is random.
        length: tokens of the prompt with the answers, or with what is reserved for them.
        needles: facts.
        asked: "one" (the first depth's) or "all".
        depths: of the facts, from 0 (at the beginning) to 1.
        reserve: tokens that a model may write; None: a sample to train on, answers in their order.
    """
    encode = kit.coder.encode
    keys, values = kit.keys(rng, needles), kit.values(rng, "numbers", needles, needles)
    fact, is_, stop = encode(FACT), encode(" is"), encode(".")
    facts = [np.concatenate([fact, keys[i], is_, values[i], stop]) for i in range(needles)]
    wanted = [0] if asked == "one" else rng.permutation(needles).tolist()
    question = _question(kit, [keys[i] for i in wanted], instruct=reserve is not None)
    given: list[Integers] = []
    for number, which in enumerate(wanted):
        cue = np.concatenate([stop if number else stop[:0], fact, keys[which], is_])
        given.append(cue if len(wanted) > 1 else cue[:0])
    after = sum(len(g) + len(values[i]) for g, i in zip(given, wanted, strict=True))
    begin = kit.coder.begin
    fixed = len(begin) + sum(map(len, facts)) + len(question)
    room = length - fixed - (after if reserve is None else reserve)
    if room < 1:
        raise ValueError(f"length must be at least {length - room + 1} for this, got {length}")
    text, places = hide(haystack.cut(rng, room), facts, depths)
    sources = [len(begin) + places[i] + len(fact) + len(keys[i]) + len(is_) for i in wanted]
    return Sample(
        prompt=np.concatenate([begin, text, question]),
        expected=tuple(kit.text(values[i]) for i in wanted),
        answers=tuple(
            Answer(values[i], source, cue)
            for i, source, cue in zip(wanted, sources, given, strict=True)
        ),
        depths=tuple(float(depths[i]) for i in wanted),
    )


def _question(kit: Kit, keys: Sequence[Integers], *, instruct: bool) -> Integers:
    """What is asked, and the beginning of an answer: of the one there is, or where told to."""
    encode = kit.coder.encode
    if len(keys) == 1:
        asks, says, ends = "\nWhat is the special magic number for", FACT, " is"
    else:
        asks, says = "\nWhat are the special magic numbers for", " The special magic numbers for"
        ends = " mentioned in the text are"
    named = [keys[0]]
    for key in keys[1:-1]:
        named += [encode(","), key]
    if len(keys) > 1:
        named += [encode(", and"), keys[-1]]
    parts = [encode(asks), *named, encode("?")]
    if instruct or len(keys) == 1:
        parts += [encode(says), *named, encode(ends)]
    return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class MultiNeedle(HaystackTask):
    """`needle_sample` as a task: results by how deep in the text the answer lies.

    In training facts lie anywhere. In the other splits the one asked for goes through `depths` in
    turn, index by index (of all, each starts elsewhere in them), so that each depth is asked for
    equally often.

    Args (and those of `HaystackTask`):
        needles: facts in a text.
        needles_from: in training, facts in a text are from so many up to `needles`; None: always
            `needles`. To find the only number there is must be learned before numbers by key.
        asked: "one" of them, or "all", in an order that has nothing to do with the text's.
        depths: from 0 (the beginning) to 1 (just before the question), increasing.
        values: different numbers in the vocabulary of words; fewer are learned sooner.

    >>> task = MultiNeedle(length=512, needles=4, asked="all")
    >>> batch = task.batch("test", [0])
    >>> batch["input_ids"].shape, int((batch["labels"] >= 0).sum())
    (torch.Size([1, 512]), 4)
    """

    name: ClassVar[str] = "multi_needle"
    needles: int = 1
    needles_from: int | None = None
    asked: Literal["one", "all"] = "one"
    depths: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    values: int = WordCoder.NUMBERS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "depths", tuple(map(float, self.depths)))
        check_choice("asked", self.asked, ("one", "all"))
        if not 1 <= self.values <= WordCoder.NUMBERS:
            most = WordCoder.NUMBERS
            raise ValueError(f"values must lie in [1, {most}], got {self.values}")
        if self.needles < 1:
            raise ValueError(f"needles must be at least 1, got {self.needles}")
        if self.needles_from is not None and not 1 <= self.needles_from <= self.needles:
            raise ValueError(
                f"needles_from must lie in [1, {self.needles}], got {self.needles_from}"
            )
        ordered = list(self.depths) == sorted(set(self.depths)) and len(self.depths) > 0
        if not ordered or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths must lie in [0, 1] and increase, got {self.depths}")

    @property
    def coder(self) -> Coder:
        """The vocabulary."""
        return _coder(self.tokens, self.words, self.values)

    @cached_property
    def kit(self) -> Kit:
        """What facts are made of."""
        return Kit(self.coder, self.value_tokens)

    @cached_property
    def _made(self) -> Haystack:
        return MadeSentences(self.coder)

    @property
    def num_classes(self) -> int:
        """All bytes, or numbers."""
        return self.values if self.tokens == "words" else self.coder.size

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """The depths, in per cent."""
        return tuple(f"{100 * depth:g}%" for depth in self.depths)

    def bucket(self, depth: float) -> int:
        """The nearest of `depths`."""
        return int(np.argmin(np.abs(np.asarray(self.depths) - depth)))

    def sample(
        self, rng: np.random.Generator, length: int, split: Split, index: int | None = None
    ) -> Sample:
        """See `HaystackTask.sample`."""
        needles = self.needles
        if split == "train" and self.needles_from is not None:
            needles = int(rng.integers(self.needles_from, needles + 1))
        depths = rng.random(needles)
        if split != "train" and index is not None:
            count = len(self.depths)
            turns = range(needles if self.asked == "all" else 1)
            for turn in turns:
                depths[turn] = self.depths[(index + turn * count // needles) % count]
        haystack = self.shelf(split, self.length) or self._made
        return needle_sample(
            self.kit,
            haystack,
            rng,
            length,
            needles=needles,
            asked=self.asked,
            depths=depths.tolist(),
        )
