"""Train the entity probe that ships with vort, and judge it, on LitBank's proper names.

    python tools/train_entity_probe.py train --data FOLDER
    python tools/train_entity_probe.py eval --data FOLDER

FOLDER holds LitBank (coref/*.ann, *.txt). The probe is an L2-regularised logistic regression,
penalty and threshold tuned on validation novels, scored token by token on novels it never saw.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, vstack
from scipy.special import expit

from vort.layers.entity_probe import EntityProbe, LinearProbe, RuleProbe, entity_indicator
from vort.layers.entity_probe.features import feature_ids
from vort.layers.entity_probe.probes import save_probes
from vort.layers.entity_probe.words import Words

Split = Literal["train", "validation", "test"]

SPLIT_SEED = 0
VALIDATION_NOVELS = 15
TEST_NOVELS = 20

_NO_SPACE_BEFORE = re.compile(r"[,.;:!?)\]’”…]|['’](s|S|d|ll|m|re|ve)$|n['’]t$")
_NO_SPACE_AFTER = frozenset("([“‘")

BUCKETS = 1 << 15
PENALTIES = (0.3, 1.0, 3.0)
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(-10, 6))
_MAX_ITERATIONS = 80


@dataclass(frozen=True)
class Novel:
    """A passage as a reader would see it, with LitBank's tokens located in it.

    Attributes:
        name: file name in LitBank without its ending.
        text: running text; LitBank's spaces around punctuation are taken out again, because the
            probe meets text as it is printed.
        spans: `(start, end)` characters of every LitBank token.
        in_name: whether the token lies inside a mention marked PROP.
    """

    name: str
    text: str
    spans: list[tuple[int, int]]
    in_name: list[bool]

    @property
    def names(self) -> list[bool]:
        """The gold standard: capitalised tokens of proper names.

        LitBank's PROP mentions hold whole phrases ("the late Mr. Elliot"); what names the entity
        in them is capitalised, the rest ("the", "of", "late", "'s") marks no entity by itself.
        """
        return [
            inside and self.text[start].isupper()
            for (start, _), inside in zip(self.spans, self.in_name, strict=True)
        ]


def read_litbank(data: str | Path) -> list[Novel]:
    """All novels in a folder that holds LitBank's `coref/*.ann` and `coref/*.txt`, by name."""
    folder = Path(data)
    if not (folder / "coref").is_dir() and (folder / "litbank").is_dir():
        folder = folder / "litbank"
    files = sorted((folder / "coref").glob("*.ann"))
    if not files:
        raise FileNotFoundError(f"data must hold LitBank's coref/*.ann, found none in {data}")
    return [_read_novel(path) for path in files]


def split_novels(novels: list[Novel], seed: int = SPLIT_SEED) -> dict[Split, list[Novel]]:
    """Novels by split: drawn by `seed` from the sorted names, the same wherever it runs."""
    if len(novels) <= TEST_NOVELS + VALIDATION_NOVELS:
        raise ValueError(
            f"novels must number more than {TEST_NOVELS + VALIDATION_NOVELS}, got {len(novels)}"
        )
    shuffled = sorted(novels, key=lambda novel: novel.name)
    random.Random(seed).shuffle(shuffled)
    held_out = TEST_NOVELS + VALIDATION_NOVELS
    return {
        "test": shuffled[:TEST_NOVELS],
        "validation": shuffled[TEST_NOVELS:held_out],
        "train": shuffled[held_out:],
    }


def _read_novel(annotation: Path) -> Novel:
    lines = annotation.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    sentences = [line.split(" ") for line in lines]
    inside = [[False] * len(sentence) for sentence in sentences]
    for sentence, first, last in _proper_mentions(annotation):
        inside[sentence][first : last + 1] = [True] * (last + 1 - first)
    text, spans = _running_text(sentences)
    name = annotation.stem.removesuffix("_brat")
    return Novel(name, text, spans, [flag for line in inside for flag in line])


def _proper_mentions(annotation: Path) -> Iterator[tuple[int, int, int]]:
    """(sentence, first token, last token) of the mentions marked PROP; none crosses sentences.

    A line reads MENTION, id, sentence, token, sentence, token (both inclusive), text, type, kind.
    """
    for line in annotation.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if fields[0] == "MENTION" and fields[-1] == "PROP":
            yield int(fields[2]), int(fields[3]), int(fields[5])


def _running_text(sentences: list[list[str]]) -> tuple[str, list[tuple[int, int]]]:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    glue, quoting = True, False
    for sentence in sentences:
        for position, token in enumerate(sentence):
            opens = token == '"' and (position == 0 or not quoting)
            closes = (token == '"' and not opens) or _attaches_left(token, pieces)
            if not glue and not closes:
                pieces.append(" ")
                length += 1
            spans.append((length, length + len(token)))
            pieces.append(token)
            length += len(token)
            glue = opens or token in _NO_SPACE_AFTER
            if token == '"':
                quoting = opens
    return "".join(pieces), spans


def _attaches_left(token: str, pieces: list[str]) -> bool:
    if token == "'":  # a plural possessive ("the lawyers' clerks") or an opening quotation mark
        return bool(pieces) and pieces[-1].endswith("s")
    return _NO_SPACE_BEFORE.match(token) is not None


@dataclass(frozen=True)
class Score:
    """Counts of tokens, and what follows from them.

    >>> Score(found=8, spurious=2, missed=2).f1
    0.8
    """

    found: int
    spurious: int
    missed: int

    @property
    def precision(self) -> float:
        """Share of the marked tokens that belong to names."""
        return self.found / max(self.found + self.spurious, 1)

    @property
    def recall(self) -> float:
        """Share of the names' tokens that are marked."""
        return self.found / max(self.found + self.missed, 1)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.found / max(2 * self.found + self.spurious + self.missed, 1)


def score_probe(
    probe: EntityProbe, novels: Iterable[Novel], *, whole_mentions: bool = False
) -> Score:
    """The score of a probe over the tokens of all `novels` together.

    Args:
        probe: what to judge.
        novels: passages with gold names.
        whole_mentions: count every token of a PROP mention, "the" and "of" included, instead of
            its capitalised tokens.
    """
    found = spurious = missed = 0
    for novel in novels:
        marked = entity_indicator(novel.text, novel.spans, probe).numpy() > 0
        gold = np.array(novel.in_name if whole_mentions else novel.names)
        found += int((marked & gold).sum())
        spurious += int((marked & ~gold).sum())
        missed += int((~marked & gold).sum())
    return Score(found, spurious, missed)


@dataclass(frozen=True)
class Fit:
    """A fitted probe and the settings that validation chose."""

    probe: LinearProbe
    penalty: float
    validation_f1: float


def fit_probe(
    train: Sequence[Novel],
    validation: Sequence[Novel],
    *,
    causal: bool,
    buckets: int = BUCKETS,
    penalties: Sequence[float] = PENALTIES,
    on_step: Callable[[], None] = lambda: None,
) -> Fit:
    """Choose penalty and threshold on `validation`, then refit on both.

    Args:
        train: novels to learn from.
        validation: novels to choose by.
        causal: use features of the word and what precedes it alone.
        buckets: size of the hash table.
        penalties: L2 strengths to try.
        on_step: called after each of the `len(penalties) + 1` fits.
    """
    best = Fit(LinearProbe(np.zeros(buckets, np.float32), causal=causal), penalties[0], -1.0)
    examples = _examples(train, buckets, causal)
    for penalty in penalties:
        weights = _logistic_regression(*examples, penalty)
        for threshold in THRESHOLDS:
            probe = LinearProbe(weights, threshold, causal=causal)
            f1 = score_probe(probe, validation).f1
            if f1 > best.validation_f1:
                best = Fit(probe, penalty, f1)
        on_step()
    both = _examples([*train, *validation], buckets, causal)
    weights = _logistic_regression(*both, best.penalty)
    on_step()
    final = LinearProbe(weights, best.probe.threshold, causal=causal)
    return Fit(final, best.penalty, best.validation_f1)


def _examples(
    novels: Sequence[Novel], buckets: int, causal: bool
) -> tuple[csr_matrix, NDArray[np.float64]]:
    """One row of features and one label per capitalised word."""
    rows, labels = [], []
    for novel in novels:
        words = Words.of(novel.text)
        ids, offsets = feature_ids(words, buckets, causal=causal)
        ones = np.ones(len(ids))
        bounds = np.append(offsets, len(ids))
        rows.append(csr_matrix((ones, ids, bounds), shape=(len(offsets), buckets)))
        labels.append(_labels(novel, words))
    return vstack(rows).tocsr(), np.concatenate(labels)


def _labels(novel: Novel, words: Words) -> NDArray[np.float64]:
    named = np.zeros(len(novel.text) + 1)
    for (start, end), is_name in zip(novel.spans, novel.names, strict=True):
        named[start + 1 : end + 1] = is_name
    before = np.cumsum(named)
    spans = np.array([words.spans[i] for i in words.capitalised], dtype=np.int64).reshape(-1, 2)
    inside: NDArray[np.float64] = (before[spans[:, 1]] > before[spans[:, 0]]).astype(np.float64)
    return inside


def _logistic_regression(
    features: csr_matrix, labels: NDArray[np.float64], penalty: float
) -> NDArray[np.float32]:
    used = np.unique(features.indices)  # the penalty keeps all other weights at zero
    compact = features[:, used]
    transposed = compact.T.tocsr()

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        odds = compact @ weights
        value = np.logaddexp(0.0, odds).sum() - labels @ odds + 0.5 * penalty * weights @ weights
        return float(value), transposed @ (expit(odds) - labels) + penalty * weights

    options = {"maxiter": _MAX_ITERATIONS}
    solution = minimize(loss, np.zeros(len(used)), jac=True, method="L-BFGS-B", options=options)
    weights = np.zeros(features.shape[1], dtype=np.float32)
    # Rounded as they will be stored, so that what is judged is what is shipped.
    weights[used] = solution.x.astype(np.float16)
    return weights


app = typer.Typer(help="The entity probe: train, evaluate.", no_args_is_help=True)
console = Console()

Data = Annotated[Path, typer.Option(help="Folder that holds LitBank (coref/*.ann, *.txt).")]


@app.command()
def train(
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="File to write; unless given, the one vort ships.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the novels of each split.")] = 0,
) -> None:
    """Fit the linear probe on LitBank's proper names and test it on novels it has not seen."""
    novels = _read_split(data, seed)
    fits = {}
    with Progress(console=console, transient=True) as progress:
        for name in ("full", "causal"):
            task = progress.add_task(f"fitting ({name})", total=len(PENALTIES) + 1)
            fits[name] = fit_probe(
                novels["train"],
                novels["validation"],
                causal=name == "causal",
                on_step=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
    target = out if out is not None else _shipped_file()
    about = _about(novels, fits, seed)
    save_probes(target, fits["full"].probe, fits["causal"].probe, about)
    for name, fit in fits.items():
        console.print(
            f"{name}: penalty {fit.penalty:g}, threshold {fit.probe.threshold:g}, "
            f"F1 {fit.validation_f1:.3f} on validation novels",
            highlight=False,
        )
    console.print(f"probe written to {target} ({target.stat().st_size / 1024:.0f} KiB)")
    console.print(_score_table(novels["test"], target, "test"))


@app.command("eval")
def evaluate(
    data: Data,
    probe: Annotated[
        Path | None, typer.Option(help="A probe written by train; unless given, the shipped one.")
    ] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    seed: Annotated[int, typer.Option(help="Draws the novels of each split.")] = 0,
) -> None:
    """Precision, recall and F1 of every probe on the held-out novels."""
    novels = _read_split(data, seed)
    if split not in novels:
        raise typer.BadParameter(f"--split takes {', '.join(novels)}, got {split}")
    with console.status("probing"):
        table = _score_table(novels[split], probe, split)
    console.print(table)


def _read_split(data: Path, seed: int) -> dict[Split, list[Novel]]:
    try:
        return split_novels(read_litbank(data), seed)
    except (FileNotFoundError, ValueError) as problem:
        raise typer.BadParameter(str(problem), param_hint="--data") from problem


def _shipped_file() -> Path:
    return Path(str(resources.files("vort.layers.entity_probe"))) / "linear_probe.safetensors"


def _about(novels: dict[Split, list[Novel]], fits: dict[str, Fit], seed: int) -> dict[str, Any]:
    return {
        "command": f"python tools/train_entity_probe.py train --data LITBANK --seed {seed}",
        "data": "LitBank (dbamman/litbank, CC-BY 4.0), coref/*.ann, mentions marked PROP",
        "gold": "capitalised tokens inside PROP mentions",
        "seed": seed,
        "split": {name: [novel.name for novel in part] for name, part in novels.items()},
        "fitted_on": "train and validation; penalty and threshold chosen on validation",
        "penalty": {name: fit.penalty for name, fit in fits.items()},
        "validation_f1": {name: round(fit.validation_f1, 4) for name, fit in fits.items()},
        "test_f1": {
            name: round(score_probe(fit.probe, novels["test"]).f1, 4) for name, fit in fits.items()
        },
    }


def _score_table(novels: list[Novel], file: Path | None, split: str) -> Table:
    table = Table(title=f"Tokens of proper names in {len(novels)} {split} novels")
    for heading in ("probe", "looks ahead", "precision", "recall", "F1", "F1, whole mentions"):
        table.add_column(heading, justify="left" if heading == "probe" else "right")
    for name, probe in _probes(file).items():
        score = score_probe(probe, novels)
        whole = score_probe(probe, novels, whole_mentions=True)
        ahead = "no" if getattr(probe, "causal", False) else "yes"
        table.add_row(name, ahead, *_figures(score), f"{whole.f1:.3f}")
    return table


def _figures(score: Score) -> tuple[str, str, str]:
    return f"{score.precision:.3f}", f"{score.recall:.3f}", f"{score.f1:.3f}"


def _probes(file: Path | None) -> dict[str, EntityProbe]:
    source = _shipped_file() if file is None else file
    return {
        "RuleProbe": RuleProbe(),
        "RuleProbe, causal": RuleProbe(causal=True),
        "LinearProbe": LinearProbe.load(source),
        "LinearProbe, causal": LinearProbe.load(source, causal=True),
    }


if __name__ == "__main__":
    app()
