"""RULER's thirteen tasks (Hsieh et al. 2024), as prompts for any model and as tasks to train on.

Words of the prompts are the published ones, as lm_eval's tasks of the same names have them. Here
every prompt has exactly the length that is asked for, with the tokens that are reserved for an
answer: the text is cut at its beginning, or the last of what fills it is cut to fit.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
from scipy.special import zeta

from vort.lab.tasks.haystack import (
    NOISE,
    Answer,
    Haystack,
    HaystackTask,
    Kit,
    Lines,
    MadeSentences,
    Sample,
    hide,
)
from vort.lab.tasks.pieces import ByteCoder, Coder, Pool, WordCoder, weave
from vort.lab.tasks.question_files import Asked, Questions
from vort.lab.tasks.task import Integers, Split
from vort.names import check_choice

__all__ = [
    "ESSAYS",
    "GENERATED",
    "RULER",
    "SYNTHETIC",
    "Ruler",
    "RulerPrompts",
    "ruler_score",
    "split_prompt",
]

Synthetic = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
]
SYNTHETIC: tuple[Synthetic, ...] = get_args(Synthetic)
Kind = Literal[Synthetic, "all"]
RULER: tuple[str, ...] = (*SYNTHETIC, "qa_1", "qa_2")


class Niah(NamedTuple):
    """A needle in a haystack: what the haystack is, what keys and values are, and how many."""

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}
ESSAYS = tuple(task for task, each in NIAH.items() if each.haystack == "essay")
# Tokens that a model may write.
GENERATED = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}

# What is in the text by its parts; {} is a kind of value.
_HIDDEN = {
    False: "A special magic {} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {} afterwards.\n",
    True: "Some special magic {} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {} afterwards.\n",
}
_ASKED = {False: "What is the special magic {} for", True: "What are all the special magic {} for"}
_SAID = " The special magic {} for"
_MENTIONED = " mentioned in the provided text"
_NEEDLE = "One of the special magic {} for"
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_FIND = "\nQuestion: Find all variables that are assigned the value", " in the text above."
_FOUND = (
    " Answer: According to the chain(s) of variable assignment in the text above, ",
    " variables are assgined the value",  # so spelled in the published prompt
    ", they are:",
)
_LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_COMMON = (
    "\nQuestion: What are the 10 most common words in the above list?\n\n"
    "Answer: The top 10 words that appear most often in the list are:"
)
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words."
)
_FREQUENT = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded "
    "text above, the three most frequently appeared words are:"
)
_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
_DOCUMENTS = _INSTRUCTION + "The following are given documents.\n\n"
_KINDS = ("number", "numbers", "uuid", "uuids")
_TEXTS = (
    *(t.format(kind, kind) for t in (*_HIDDEN.values(), *_ASKED.values()) for kind in _KINDS),
    *(text.format(kind) for text in (_SAID, _NEEDLE, f" {_NEEDLE}") for kind in _KINDS),
    *(_MENTIONED, " is:. are? , and\n", NOISE, f" {NOISE}\n", _TRACK, *_FIND, *_FOUND, " VAR = 5"),
    *(_LIST, _COMMON, _CODED, _FREQUENT, " ...", *MadeSentences.TEXTS),
)
# Chain and hops of variable tracking; words and frequencies of common words.
HOPS = 4
COMMON_WORDS = 10


@lru_cache(maxsize=8)
def _coder(tokens: str, words: int) -> Coder:
    return ByteCoder() if tokens == "bytes" else WordCoder(words, _TEXTS)


class _Room(NamedTuple):
    """How long a sample is, and how much of it an answer takes: its own length if None."""

    length: int
    reserve: int | None

    def left(self, *parts: Integers, answers: Sequence[Answer] = ()) -> int:
        """Tokens that are left for a haystack."""
        own = sum(len(answer.given) + len(answer.tokens) for answer in answers)
        left = self.length - sum(map(len, parts)) - (own if self.reserve is None else self.reserve)
        if left < 1:
            raise ValueError(
                f"length must be at least {self.length - left + 1} for this task, got {self.length}"
            )
        return left


class RulerPrompts:
    """Samples of RULER's tasks in the tokens of a vocabulary.

    Args:
        kit: keys, values and words in that vocabulary.
        essays: the haystack of the tasks that want essays; None: made sentences.
        questions: those of qa_1 and qa_2 by name, for those that are asked for.
    """

    def __init__(
        self,
        kit: Kit,
        essays: Haystack | None = None,
        questions: dict[str, Questions] | None = None,
    ) -> None:
        self.kit, self.encode = kit, lru_cache(maxsize=512)(kit.coder.encode)
        self.essays = MadeSentences(kit.coder) if essays is None else essays
        self.questions = questions or {}
        self._documents: dict[tuple[str, int], Integers] = {}

    def sample(
        self,
        task: str,
        rng: np.random.Generator,
        length: int,
        reserve: int | None = None,
        index: int = 0,
    ) -> Sample:
        """One sample of exactly `length` tokens.

        Args:
            task: one of `RULER`.
            rng: all that is random.
            length: tokens of the prompt and of what is reserved.
            reserve: tokens that a model may write; None: a sample to train on, with its answers.
            index: which question, of tasks with a file of them.
        """
        check_choice("task", task, RULER)
        room = _Room(length, reserve)
        if task in NIAH:
            return self._niah(NIAH[task], rng, room)
        if task in ("qa_1", "qa_2"):
            return self._questions(task, rng, room, index)
        made: Sample = getattr(self, f"_{task}")(rng, room)
        return made

    def _niah(self, task: Niah, rng: np.random.Generator, room: _Room) -> Sample:
        kit, encode, begin = self.kit, self.encode, self.kit.coder.begin
        count = task.keys * task.values
        many = task.queries * task.values > 1
        kind = task.value if many else task.value[:-1]
        lines = task.haystack != "essay"
        is_, ends = encode(" is:"), encode(".\n" if lines else ".")
        opens = encode(("" if lines else " ") + _NEEDLE.format(task.value))
        head = np.concatenate([begin, encode(_HIDDEN[many].format(kind, kind))])
        # Distractors are drawn with the needles, so that none has a key that is asked for.
        extra = 0
        if task.haystack == "needles":
            least = len(opens) + len(is_) + len(ends)
            least += kit.shortest(task.key) + kit.shortest(task.value)
            extra = room.length // least + 1
        keys = (
            kit.uuids(rng, task.keys + extra, task.keys, keys=True)
            if task.key == "uuids"
            else kit.keys(rng, task.keys + extra, task.keys)
        )
        values = kit.values(rng, task.value, count + extra, count)
        asked = rng.permutation(task.keys)[: task.queries].tolist()
        owner = [number // task.values for number in range(count)]
        needles = [
            np.concatenate([opens, keys[owner[n]], is_, values[n], ends]) for n in range(count)
        ]
        tail = self._niah_tail([keys[i] for i in asked], kind, many, lines=lines)
        wanted = [n for i in asked for n in range(count) if owner[n] == i]
        comma = encode(",")
        plain = [Answer(values[n], 0, comma if i else comma[:0]) for i, n in enumerate(wanted)]
        left = room.left(head, tail, *needles, answers=plain)
        if task.haystack == "needles":
            hay = self._distractors(opens, keys, is_, values, ends, (task.keys, count), left)
        elif task.haystack == "noise":
            hay = Lines(encode(NOISE + "\n")).cut(rng, left)
        else:
            hay = self.essays.cut(rng, left)
        depths = (
            rng.choice(40, count, replace=False) / 39 if not lines else rng.random(count)
        ).tolist()
        text, places = hide(hay, needles, depths)
        at = {
            n: len(head) + places[n] + len(opens) + len(keys[owner[n]]) + len(is_) for n in wanted
        }
        if task.values > 1:  # several values of a key are asked for in the order of the text
            wanted = sorted(wanted, key=lambda n: at[n])
        answers = [
            Answer(values[n], at[n], comma if i else comma[:0]) for i, n in enumerate(wanted)
        ]
        return Sample(
            prompt=np.concatenate([head, text, tail]),
            expected=tuple(kit.text(values[n]) for n in wanted),
            answers=tuple(answers),
            depths=tuple(depths[n] for n in wanted),
        )

    def _niah_tail(
        self, keys: Sequence[Integers], kind: str, many: bool, *, lines: bool
    ) -> Integers:
        named = [keys[0]]
        for key in keys[1:-1]:
            named += [self.encode(","), key]
        if len(keys) > 1:
            named += [self.encode(", and"), keys[-1]]
        asks = ("" if lines else "\n") + _ASKED[many].format(kind)
        said = self.encode(_MENTIONED + (" are" if many else " is"))
        question = [self.encode(asks), *named, self.encode(_MENTIONED + "?")]
        return np.concatenate([*question, self.encode(_SAID.format(kind)), *named, said])

    def _distractors(
        self,
        opens: Integers,
        keys: Pool,
        is_: Integers,
        values: Pool,
        ends: Integers,
        own: tuple[int, int],
        left: int,
    ) -> tuple[Integers, Integers]:
        """Needles that nobody asks for, as a haystack."""
        extra = len(keys) - own[0]
        rest = np.arange(extra)
        lines = weave(
            Pool.same(opens, extra),
            keys.take(own[0] + rest),
            Pool.same(is_, extra),
            values.take(own[1] + rest),
            Pool.same(ends, extra),
        )
        whole = np.cumsum(lines.lengths[::-1])
        number = int(np.searchsorted(whole, left)) + 1
        tokens = lines.take(np.arange(extra - number, extra)).joined()
        missing = len(tokens) - left
        begins = lines.starts[extra - number :] - lines.starts[extra - number] - missing
        return tokens[missing:], np.append(begins[begins >= 0], left)

    def _vt(self, rng: np.random.Generator, room: _Room) -> Sample:
        example = self.kit.coder.begin
        chain = self._chain(rng, None, letters=5)
        if room.reserve is not None:
            noise = 10 * len(self.encode(f" {NOISE}\n"))
            shown = self._chain(rng, noise, letters=3)
            while np.array_equal(shown.value, chain.value):  # it asks for another number
                shown = self._chain(rng, noise, letters=3)
            names = [shown.names[i] for i in range(HOPS + 1)]
            answer = [self.encode(" "), *names, self.encode("\n\n\n\n")]
            example = np.concatenate([example, shown.head, shown.text, shown.tail, *answer])
        answers = [Answer(chain.names[i], 0) for i in range(HOPS + 1)]
        left = room.left(example, chain.head, chain.tail, *chain.lines, answers=answers)
        chain = chain.hidden(self._noise.cut(rng, left), rng)
        before = len(example) + len(chain.head)
        sources = [before + place + len(self.encode(" VAR")) for place in chain.places]
        return Sample(
            prompt=np.concatenate([example, chain.head, chain.text, chain.tail]),
            expected=tuple(self.kit.text(chain.names[i]) for i in range(HOPS + 1)),
            answers=tuple(Answer(chain.names[i], sources[i]) for i in range(HOPS + 1)),
        )

    @cached_property
    def _noise(self) -> Lines:
        return Lines(self.encode(f" {NOISE}\n"))

    def _chain(self, rng: np.random.Generator, noise: int | None, letters: int) -> "_Chain":
        """VAR A = number, VAR B = VAR A, ...; hidden in so much noise if any is wanted."""
        encode = self.encode
        names, value = self.kit.names(rng, HOPS + 1, letters), self.kit.amount(rng)
        var, equals, space = encode(" VAR"), encode(" ="), encode(" ")
        copies = [[var, names[i + 1], equals, var, names[i], space] for i in range(HOPS)]
        lines = [np.concatenate(line) for line in ([var, names[0], equals, value], *copies)]
        count = encode(str(HOPS + 1))
        asks = [encode(_FIND[0]), value, encode(_FIND[1])]
        says = [encode(_FOUND[0].rstrip()), space, count, encode(_FOUND[1]), value]
        tail = np.concatenate([*asks, *says, encode(_FOUND[2])])
        chain = _Chain(encode(_TRACK), tail, names, value, lines)
        return chain if noise is None else chain.hidden(self._noise.cut(rng, noise), rng)

    def _cwe(self, rng: np.random.Generator, room: _Room) -> Sample:
        kit, encode = self.kit, self.encode
        often, seldom = (30, 3) if room.length >= 4096 else (6, 1)
        order = rng.permutation(len(kit.words))
        words = kit.words.take(order)
        head, tail = np.concatenate([kit.coder.begin, encode(_LIST)]), encode(_COMMON)
        count, common = len(order), np.arange(COMMON_WORDS)
        answers = [Answer(words[i], 0, encode(kit.counted(i + 1))) for i in range(COMMON_WORDS)]
        left = room.left(head, tail, answers=answers)
        # Tokens of lists with so many words that are not common.
        rest = np.append(0, np.cumsum(words.lengths[COMMON_WORDS:])) * seldom
        items = COMMON_WORDS * often + np.arange(len(rest)) * seldom
        most = int(np.searchsorted(items, left // 2)) + 1
        numbers = kit.counting(int(items[: most + 1][-1]))
        counted = np.append(0, np.cumsum(numbers.lengths))
        known = items < len(counted)
        total = (
            int(words.lengths[:COMMON_WORDS].sum()) * often + rest[known] + counted[items[known]]
        )
        fitting = int(np.searchsorted(total, left, side="right")) - 1
        if fitting < 1:
            raise ValueError(f"length must be at least {room.length + total[1] - left}")
        if fitting == count - COMMON_WORDS and total[-1] + seldom * 8 < left:
            raise ValueError(f"words must be more than {count} for a list of this length")
        which = np.concatenate(
            [np.repeat(common, often), np.repeat(COMMON_WORDS + np.arange(fitting), seldom)]
        )
        which = rng.permutation(which)
        lines = weave(numbers.take(np.arange(len(which))), words.take(which))
        gap = self._gap(left - int(total[fitting]))
        first = np.sort([int(np.argmax(which == i)) for i in common])
        answers = [
            Answer(
                words[int(which[place])],
                len(head) + int(lines.starts[place] + numbers.lengths[place]),
                encode(kit.counted(number + 1)),
            )
            for number, place in enumerate(first.tolist())
        ]
        return Sample(
            prompt=np.concatenate([head, lines.flat, gap, tail]),
            expected=tuple(kit.text(answer.tokens) for answer in answers),
            answers=tuple(answers),
        )

    def _fwe(self, rng: np.random.Generator, room: _Room) -> Sample:
        kit, encode = self.kit, self.encode
        head, tail = np.concatenate([kit.coder.begin, encode(_CODED)]), encode(_FREQUENT)
        dots = encode(" ...")
        # Only the first few of a vocabulary are drawn at all.
        reach = int(np.sqrt(room.length)) + 8
        size = max(min(room.length // 50, reach), 8)
        words = kit.codes(rng, size - 1)
        left = room.left(head, tail, answers=[Answer(words[i], 0) for i in range(3)])
        pool = Pool.of([dots, *(words[i] for i in range(size - 1))])
        shares = np.arange(1, size + 1, dtype=np.float64) ** -2.0 / zeta(2.0)
        low, high = 0, left + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = int((np.floor(middle * shares) * pool.lengths).sum()) <= left
            low, high = (middle, high) if fits else (low, middle)
        counts = np.floor(low * shares).astype(np.int64)
        if counts[3] <= counts[4]:
            raise ValueError(f"length must be longer for three words to stand out, got {room[0]}")
        gap = left - int((counts * pool.lengths).sum())
        counts[0] += gap // len(dots)
        which = rng.permutation(np.repeat(np.arange(size), counts))
        lines = pool.take(which)
        starts = np.cumsum(lines.lengths) - lines.lengths
        first = _apart([np.flatnonzero(which == i) for i in (1, 2, 3)])
        return Sample(
            prompt=np.concatenate([head, lines.joined(), dots[: gap % len(dots)], tail]),
            expected=tuple(kit.text(pool[i]) for i in (1, 2, 3)),
            answers=tuple(
                Answer(pool[i], len(head) + int(starts[place]))
                for i, place in zip((1, 2, 3), first, strict=True)
            ),
        )

    def _gap(self, count: int) -> Integers:
        """So many tokens that say nothing: lines' ends, or stops where a tokenizer has none."""
        one = next(x for x in map(self.encode, ("\n", ".", "a")) if len(x))
        return np.tile(one, count)[:count]

    def least(self, task: str, count: int) -> int:
        """Tokens of a prompt that has room for any of the first questions of a task."""
        asked = self.questions[task].asked[:count]
        return max(
            sum(map(len, self._asks(each)))
            + sum(len(self._document(task, number)) for number in each.gold)
            + sum(len(self._title(place)) for place in range(max(1, len(each.gold))))
            for each in asked
        )

    def _asks(self, asked: Asked) -> tuple[Integers, Integers]:
        """What stands before the documents and after them."""
        tail = self.encode(f"{_INSTRUCTION}Question: {asked.question} Answer:")
        return np.concatenate([self.kit.coder.begin, self.encode(_DOCUMENTS)]), tail

    def _title(self, number: int) -> Integers:
        return self.encode(f"Document {number + 1}:\n")

    def _document(self, task: str, number: int) -> Integers:
        if (task, number) not in self._documents:
            text = self.questions[task].documents[number]
            self._documents[task, number] = self.encode(f"{text.strip()}\n\n")
        return self._documents[task, number]

    def _questions(self, task: str, rng: np.random.Generator, room: _Room, index: int) -> Sample:
        if task not in self.questions:
            raise ValueError(f"{task} needs a file of questions: see --data")
        found = self.questions[task]
        if index >= len(found.asked):
            raise ValueError(f"{task} has {len(found.asked)} questions, got index {index}")
        asked = found.asked[index]
        head, tail = self._asks(asked)
        left = room.left(head, tail)
        taken: list[Integers] = []
        size = 0
        others = np.setdiff1d(np.arange(len(found.documents)), [*asked.gold, *asked.near])
        order = [*asked.gold, *rng.permutation(np.array(asked.near, dtype=np.int64)).tolist()]
        for number in (*order, *rng.permutation(others).tolist()):
            title = self._title(len(taken))
            document = self._document(task, number)
            if size + len(title) + len(document) > left:
                if len(taken) < len(asked.gold):
                    raise ValueError(
                        f"length must be more than {room.length} for question {index} of {task}: "
                        "its documents do not fit"
                    )
                break
            taken.append(document)
            size += len(title) + len(document)
        else:
            raise ValueError(f"{task} has too few documents for {room.length} tokens")
        # The last document is cut to fit; what is too short for a title is filled with lines.
        title, end = self._title(len(taken)), self.encode("\n\n")
        words = left - size - len(title) - len(end)
        if words > 0:
            taken.append(np.concatenate([document[:words], end]))
            gap = end[:0]
        else:
            gap = self._gap(left - size)
        shuffled = [taken[i] for i in rng.permutation(len(taken)).tolist()]
        titles = [self._title(i) for i in range(len(taken))]
        text = [part for pair in zip(titles, shuffled, strict=True) for part in pair]
        return Sample(np.concatenate([head, *text, gap, tail]), expected=asked.answers)


def _apart(places: Sequence[Integers]) -> list[int]:
    """The first place of each such that none lies right before the next one's, where it can be so.

    Two answers that stood side by side in the text would be taken for one: `answers_right`.
    """
    found: list[int] = []
    for own in reversed(places):  # earlier ones are more frequent, and have more to choose from
        free = own[own != found[0] - 1] if found else own
        found.insert(0, int(free[0] if len(free) else own[0]))
    return found


class _Chain(NamedTuple):
    """A chain of variables, its question, and where it is hidden."""

    head: Integers
    tail: Integers
    names: Pool
    value: Integers
    lines: list[Integers]
    text: Integers = np.empty(0, np.int64)
    places: tuple[int, ...] = ()

    def hidden(self, hay: tuple[Integers, Integers], rng: np.random.Generator) -> "_Chain":
        """In a haystack, in its order."""
        depths = np.sort(rng.random(len(self.lines))).tolist()
        text, places = hide(hay, self.lines, depths)
        return self._replace(text=text, places=tuple(places))


def split_prompt(task: str, text: str) -> tuple[str, str]:
    """A prompt as lm_eval has it: what is read, and the words that the answer begins with.

    lm_eval puts a space between the two, and for common words an empty line.
    """
    marks = {"vt": _FOUND[0], "cwe": "\n\nAnswer:"}
    mark = _SAID.partition("{")[0] if task in NIAH else marks.get(task, " Answer:")
    place = text.rfind(mark)
    if place < 0:  # of a tokenizer that leaves out lines' ends, cases or spaces
        words = mark if task in NIAH else " Answer:"
        loose = r"\s+" + r"\s*".join(re.escape(word) for word in re.findall(r"\w+|:", words))
        places = [found.start() for found in re.finditer(loose, text, re.IGNORECASE)]
        if not places:
            raise ValueError(f"the tokenizer does not give back the prompt of {task} it was given")
        place = places[-1]
    return text[:place], text[place:].strip()


def ruler_score(task: str, said: str, expected: Sequence[str]) -> float:
    """Share of expected strings in what a model said, whatever their case; of qa: 1 for any.

    >>> ruler_score("vt", " ABCDE and fghij.", ["ABCDE", "FGHIJ", "KLMNO", "PQRST"])
    0.5
    >>> ruler_score("qa_1", "In Paris.", ["paris", "the city of Paris"])
    1.0
    """
    found = [each.lower() in said.lower() for each in expected]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)


@dataclass(frozen=True, kw_only=True)
class Ruler(HaystackTask):
    """A synthetic task of RULER to train on; the answers stand after its prompt.

    Variable tracking shows no worked example; common words are numbered in the answer as in the
    list, in the order of the text.

    Args (and those of `HaystackTask`):
        kind: which of the eleven; or "all": in training any of them, in other splits each in turn,
            and results are by task.
        words: the default is enough for a list of common words of 131,072 tokens.
        few_keys: in the vocabulary of words, only so many of them are keys, names or codes: each is
            met more often, and what is done with it learned sooner. None: all.
        few_numbers: numbers are made of only so many; None: of all thousand.

    >>> task = Ruler(kind="vt", length=512)
    >>> batch = task.batch("test", [0])
    >>> batch["input_ids"].shape, int((batch["labels"] >= 0).sum())
    (torch.Size([1, 512]), 5)
    """

    name: ClassVar[str] = "ruler"
    kind: Kind = "niah_single_1"
    words: int = 12_288
    few_keys: int | None = None
    few_numbers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("few_keys", "few_numbers"):
            value = getattr(self, name)
            if value is not None and value < 16:
                raise ValueError(f"{name} must be at least 16, or None, got {value}")
        check_choice("kind", self.kind, (*SYNTHETIC, "all"))

    @property
    def coder(self) -> Coder:
        """The vocabulary."""
        return _coder(self.tokens, self.words)

    @property
    def num_classes(self) -> int:
        """All bytes; of words numbers, or numbers and words where words are asked for."""
        numbers = self.tokens == "words" and self.kind in NIAH
        return WordCoder.NUMBERS if numbers else super().num_classes

    @cached_property
    def _prompts(self) -> dict[str, RulerPrompts]:
        return {}

    def prompts(self, split: Split) -> RulerPrompts:
        """What makes the samples of a split."""
        key = "" if self.source is None else split
        if key not in self._prompts:
            kit = Kit(
                self.coder,
                self.value_tokens,
                few_keys=self.few_keys,
                few_numbers=self.few_numbers,
            )
            self._prompts[key] = RulerPrompts(kit, self.shelf(split, self.length))
        return self._prompts[key]

    def sample(
        self, rng: np.random.Generator, length: int, split: Split, index: int | None = None
    ) -> Sample:
        """See `HaystackTask.sample`."""
        if self.kind != "all":
            return self.prompts(split).sample(self.kind, rng, length)
        which = int(rng.integers(len(SYNTHETIC)))
        if split != "train" and index is not None:
            which = index % len(SYNTHETIC)
        found = self.prompts(split).sample(SYNTHETIC[which], rng, length)
        return replace(found, bucket=which)

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Classes of lag, or the tasks."""
        return SYNTHETIC if self.kind == "all" else super().bucket_names
