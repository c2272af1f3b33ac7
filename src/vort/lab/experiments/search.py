"""Settings of each row, searched in stages on validation data, with the same budget for all.

Stage 1 tries seven settings for a small share of a run, stage 2 the best three for a quarter,
stage 3 the best two for all of it; the lowest bits on the validation split win. Learning rates lie
between 3e-4 and 1e-2; a row with a decay of its own to choose spends some of its seven trials on
that. Where the best of a stage lies at the edge of what its row has tried, the value beyond is
tried in that stage too, and the one beyond that; at full length a learning rate is at the edge
until the next one on either side was tried at that length, since short trials favour others. Seeds
are of no table, and no test split is seen. One seed is enough where rates differ by more than seeds
do; where they do not, whole trials at named rates have several, and the lowest mean wins.

All that was ever tried is in `trials.jsonl`, a line each; it only grows, and the best settings
follow from it. `vort tune` makes trials, `vort tune --collect` takes them up.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from vort.files import write_atomically
from vort.lab.experiments.cell import Cell, RunFolder, Size
from vort.lab.experiments.experiment import Experiment, Record
from vort.lab.experiments.models import MODELS
from vort.lab.report.folder import read_cells
from vort.lab.tasks import make_task

__all__ = [
    "EARLIER",
    "FILE",
    "FULL",
    "PLANNED",
    "RATES",
    "SEED",
    "Choice",
    "RowSearch",
    "append",
    "choice_of",
    "chosen_in",
    "collect",
    "first_searched",
    "has_fixed_decay",
    "known_scores",
    "line_of",
    "model_settings",
    "read_lines",
    "row_searches",
    "searched",
]

Line = Mapping[str, Any]
Settings = dict[str, Any]
# What a trial came to, by its cell: bits, or None where training broke down; no entry: not done.
Scores = Mapping[str, float | None]

FILE = Path(__file__).with_name("trials.jsonl")
# Of no table, so that a setting is not chosen for the weights and data it is then judged with; of
# several, the first.
SEED = 100
RATIO = (1e-2 / 3e-4) ** (1 / 6)
RATES = tuple(float(f"{3e-4 * RATIO**step:.1e}") for step in range(7))
# Shares of a run in stages 2 and 3, and how many of a stage go on to the next.
_LATER = (0.25, 1.0)
_GO_ON = (3, 2)
# Trials of each stage, those beyond an edge apart.
PLANNED = (len(RATES), *_GO_ON)
# The stage of full-length trials.
FULL = len(PLANNED)
# Values beyond an edge that a stage tries at most: where bits fall for ever, something is wrong.
_BEYOND = 5
# Trials of before there were stages: all of one length, a few hundredths of a run at paper size.
EARLIER = "before stages"
# What a trial beyond an edge has in the place where a cell says whose settings it takes.
_PAST_EDGE = "beyond the edge, "
# The slowest rate of a mixture, where it starts, and of free writes: as time constants in shares of
# the length.
_HORIZONS = (0.1, 0.3, 1.0, 3.0)


def read_lines(file: Path | None = None) -> list[Line]:
    """All trials that were taken up, the oldest first; those of `FILE` by default."""
    file = file or FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@cache
def _taken_up() -> list[Line]:
    return read_lines()


def searched(search: str, size: Size, lines: Sequence[Line] | None = None) -> Settings | None:
    """The best settings that a search found; None if there was no such search.

    Of the deepest stage that a row came to, those with the lowest score; where it was never
    searched in stages, those of the earlier search. A row that was defined anew and searched again
    counts as it was defined last.

    Args:
        search: whose, by experiment and row; nobody is taken for another.
        size: "laptop" or "paper".
        lines: trials; those taken up by default.

    >>> searched("pilot/vort", "laptop"), searched("pilot/vort_new", "laptop")
    ({'learning_rate': 0.006}, None)
    """
    best = _best(search, size, _taken_up() if lines is None else lines)
    return None if best is None else dict(best["settings"])


def first_searched(searches: Iterable[str], size: Size, unsearched: float) -> tuple[str, Settings]:
    """Which of several searches there was first, a row's own or its kin's, and what it found.

    Args:
        searches: by experiment and row, in the order they are asked for.
        size: "laptop" or "paper".
        unsearched: the learning rate where there was none of them; its search is then "".

    >>> first_searched(["pilot/vort_new", "pilot/vort"], "laptop", 1e-3)
    ('pilot/vort', {'learning_rate': 0.006})
    """
    for search in searches:
        best = searched(search, size)
        if best is not None:
            return search, best
    return "", {"learning_rate": unsearched}


def chosen_in(search: str, size: Size, lines: Sequence[Line] | None = None) -> str:
    """Where the best settings of a search come from: "stage 3", or `EARLIER`; "": nowhere."""
    best = _best(search, size, _taken_up() if lines is None else lines)
    if best is None:
        return ""
    return EARLIER if best.get("stage") is None else f"stage {best['stage']}"


@dataclass(frozen=True)
class Choice:
    """How the learning rate of a row was chosen.

    Attributes:
        stage: of the search, that it was the best of; 0: of the earlier search.
        trials: how many the row had there.
        steps: of each of them.
        at_edge: whether no larger one, or no smaller one, was tried there, on as many seeds.
        seeds: on how many each setting was tried that could be chosen.
    """

    stage: int
    trials: int
    steps: int
    at_edge: bool
    seeds: int = 1


def choice_of(search: str, size: Size, lines: Sequence[Line] | None = None) -> Choice | None:
    """How the rate was chosen that a search has found so far; None without such a search."""
    lines = _taken_up() if lines is None else lines
    best = _best(search, size, lines)
    if best is None:
        return None
    tried = _deepest(search, size, lines, best.get("stage"))
    members = _by_settings(tried)
    seeds = len(_seeds(next(own for own in members if best in own)))
    # One that broke down was tried, on however few.
    known = [own for own in members if len(_seeds(own)) >= seeds or not all(map(_scored, own))]
    rates = [own[0]["settings"]["learning_rate"] for own in known]
    at_edge = best["settings"]["learning_rate"] in (min(rates), max(rates))
    return Choice(best.get("stage") or 0, len(tried), best.get("steps") or 0, at_edge, seeds)


def _best(search: str, size: Size, lines: Iterable[Line]) -> Line | None:
    """The first trial of the best settings: of those tried on most seeds, with the lowest mean.

    A mean over fewer says something of other seeds than a mean over all.
    """
    lines = list(lines)
    staged = _deepest(search, size, lines)
    members = _by_settings(staged or _deepest(search, size, lines, None))
    # What broke down on any seed has no score and cannot win.
    finished = [own for own in members if all(map(_scored, own))]
    most = max((len(_seeds(own)) for own in finished), default=0)

    def mean(own: Sequence[Line]) -> float:
        return sum(float(line["score"]) for line in own) / len(own)

    held = [own for own in finished if len(_seeds(own)) == most]
    return min(held, key=mean)[0] if held else None


def _by_settings(lines: Iterable[Line]) -> list[list[Line]]:
    """Trials that differ by their seed alone."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(json.dumps(line["settings"], sort_keys=True), []).append(line)
    return list(found.values())


def _seeds(lines: Iterable[Line]) -> set[object]:
    return {line.get("seed") for line in lines}


def _deepest(search: str, size: Size, lines: Iterable[Line], stage: int | None = -1) -> list[Line]:
    """Trials of a row as it was defined last, of a stage; by default the deepest with a score.

    stage: None for those of the earlier search.
    """
    experiment, _, row = search.partition("/")
    place = (size, experiment, row)
    own = [line for line in lines if (line["size"], line["experiment"], line["row"]) == place]
    if stage is None:
        return [line for line in own if line.get("search") == EARLIER]
    staged = [line for line in own if line.get("stage") is not None]
    staged = [line for line in staged if line.get("of") == staged[-1].get("of")]
    if stage < 0:
        stage = max((line["stage"] for line in staged if _scored(line)), default=0)
    return [line for line in staged if line["stage"] == stage]


def _scored(line: Line) -> bool:
    return line["score"] is not None


def has_fixed_decay(config: Mapping[str, Any]) -> bool:
    """Whether a model has one rate of decay that it does not learn."""
    return config.get("memory") == "exponential" and not config.get("learn_rates", True)


def model_settings(found: Mapping[str, Any], config: Mapping[str, Any], own: bool) -> Settings:
    """What of searched settings goes to a model: a decay goes to a row that has such a one.

    Args:
        found: by `searched`.
        config: of the row that takes them.
        own: whether they are of the row's own search; a rate that is learned starts where its own
            search says, not where the search for a fixed one does.
    """
    memory = config.get("memory")
    takes = {
        "exponential_rate": has_fixed_decay(config) or (own and memory == "exponential"),
        "horizon": memory == "mixture" or (own and _writes_freely(config)),
    }
    return {name: value for name, value in found.items() if takes.get(name, False)}


def _writes_freely(config: Mapping[str, Any]) -> bool:
    """Whether it is VORT with any mixture of its rates for a kernel.

    The rates of a power law follow from the lags that it has to fit; these are a choice, as those
    of a mixture are.
    """
    return config.get("memory", "vort") == "vort" and config.get("write_gain") == "scale"


@dataclass(frozen=True)
class _Axis:
    """A setting beside the learning rate: the values to try, and where the others are tried."""

    name: str
    values: tuple[float, ...]
    start: float


def _axis(experiment: Experiment, cell: Cell) -> _Axis | None:
    """The decay that a row has to choose, or where it is learned its start; None: no such.

    Where an experiment names no decays, it reads beyond the length that it trains at: what is best
    for the latter says nothing of the former, and rates start over the horizon of its rows.
    """
    memory, shares = cell.config.get("memory"), experiment.decays.get(cell.size)
    if shares is None:
        return None
    if memory == "exponential":
        length = make_task(**cell.task).length
        values = tuple(sorted(1 / (share * length) for share in shares))
        return _Axis("exponential_rate", values, values[len(values) // 2])
    if memory == "mixture" or _writes_freely(cell.config):
        # Of the task, not of the row's present horizon: that is what the last search found.
        length = make_task(**cell.task).length
        return _Axis("horizon", tuple(round(share * length) for share in _HORIZONS), length)
    return None


@dataclass(frozen=True)
class RowSearch:
    """The search of one row: what to try next, from what its trials came to so far.

    Attributes:
        experiment: its table.
        cell: the row's first in that table.
        share: of a run, in stage 1.
        rates: learning rates to try for all of a run, and what lies beyond them, whatever shorter
            trials say; where there are any, the stages before are left out.
        seeds: how many trials each setting has; their mean is what it came to.
    """

    experiment: Experiment
    cell: Cell
    share: float = 1 / 16
    rates: tuple[float, ...] = ()
    seeds: int = 1

    @property
    def row(self) -> str:
        """Its name."""
        return self.cell.model

    def planned(self, stages: int = FULL) -> int:
        """How many trials there are at least."""
        return self.seeds * (len(self.rates) or sum(PLANNED[:stages]))

    def next(self, scores: Scores, stages: int = FULL) -> list[Cell]:
        """The trials to do now; none where the search is over, or nothing came to an end.

        stages: how many there are to be.
        """
        return self._walk(scores, stages)[1]

    def stage(self, scores: Scores, stages: int = FULL) -> int:
        """The one that the next trial is of; 0 where there is none."""
        following = self.next(scores, stages)
        return int(following[0].tags["stage"]) if following else 0

    def finished(self, scores: Scores, stages: int = FULL) -> int:
        """How many trials are done, of those that there are."""
        return self._walk(scores, stages)[0]

    def _walk(self, scores: Scores, stages: int) -> tuple[int, list[Cell]]:
        """Through the stages, as far as they are done: how many trials are, and what comes next."""
        if self.rates:
            return self._through(FULL, [self._in_full(rate) for rate in self.rates], [], scores)[1:]
        tried: list[Settings] = []
        settings, done = self._first(scores), 0
        for stage in range(1, stages + 1):
            settings, here, missing = self._through(stage, settings, tried, scores)
            done += here
            if missing:
                return done, missing
            tried += settings
            if stage < stages:
                settings = self._ranked(stage, settings, scores)[: _GO_ON[stage - 1]]
        return done, []

    def _through(
        self, stage: int, settings: list[Settings], tried: Sequence[Settings], scores: Scores
    ) -> tuple[list[Settings], int, list[Cell]]:
        """Through one stage: all its settings, how many of them are done, and what comes next.

        tried: in the stages before.
        """
        missing = self._missing(stage, settings, scores)
        done = self.seeds * len(settings) - len(missing)
        for number in range(1, _BEYOND + 1):
            further = [] if missing else self._beyond(stage, settings, tried, scores)
            if not further:
                break
            missing = self._missing(stage, further, scores, number)
            done += self.seeds * len(further) - len(missing)
            settings = [*settings, *further]
        return settings, done, missing

    def _in_full(self, rate: float) -> Settings:
        """A learning rate to try, with the decay that the row's search has found, if it has one."""
        axis = _axis(self.experiment, self.cell)
        own = searched(f"{self.experiment.name}/{self.row}", self.cell.size) or {}
        decay = {} if axis is None else {axis.name: own.get(axis.name, axis.start)}
        return {"learning_rate": rate, **decay}

    def trial(
        self, stage: int, settings: Mapping[str, Any], beyond: int = 0, seed: int = SEED
    ) -> Cell:
        """The cell of a trial: shortened, on a seed of the search, its test split left alone.

        beyond: its number among those of its stage beyond an edge; 0: it is one of the plan.
        """
        cell = self.cell.shortened((self.share, *_LATER)[stage - 1])
        own = dict(settings)
        training = {**cell.training, "learning_rate": own.pop("learning_rate"), "test_sequences": 0}
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        return replace(
            cell,
            seed=seed,
            task={**cell.task, "seed": seed},
            config={**cell.config, **own},
            training=training,
            after={},
            tags={**cell.tags, "stage": stage, "trial": words},
            search=f"{_PAST_EDGE}{beyond}" if beyond else "",
        )

    def _first(self, scores: Scores) -> list[Settings]:
        """The seven of stage 1; with a decay to choose, learning rates come first.

        Decays are tried at the best of those; until they are done, they are all there is.
        """
        axis = _axis(self.experiment, self.cell)
        if axis is None:
            return [{"learning_rate": rate} for rate in RATES]
        others = [value for value in axis.values if value != axis.start]
        count = len(RATES) - len(others)
        places = [round(i * (len(RATES) - 1) / (count - 1)) for i in range(count)]
        rates = [{"learning_rate": RATES[place], axis.name: axis.start} for place in places]
        if self._missing(1, rates, scores):
            return rates
        ranked = self._ranked(1, rates, scores)
        return [*rates, *({**ranked[0], axis.name: value} for value in others if ranked)]

    def _missing(
        self, stage: int, settings: Iterable[Settings], scores: Scores, beyond: int = 0
    ) -> list[Cell]:
        settings = list(settings)
        seeds = range(SEED, SEED + self.seeds)
        cells = [self.trial(stage, each, beyond, seed) for seed in seeds for each in settings]
        return [cell for cell in cells if cell.fingerprint not in scores]

    def _score(self, stage: int, settings: Settings, scores: Scores) -> float | None:
        """The mean over seeds; None where a trial has none."""
        seeds = range(SEED, SEED + self.seeds)
        found = [scores.get(self.trial(stage, settings, seed=s).fingerprint) for s in seeds]
        known = [score for score in found if score is not None]
        return sum(known) / len(known) if len(known) == len(found) else None

    def _ranked(self, stage: int, settings: Iterable[Settings], scores: Scores) -> list[Settings]:
        """The best first; those that broke down are left out."""
        found = [(self._score(stage, each, scores), each) for each in settings]
        finished = [(score, each) for score, each in found if score is not None]
        return [each for _, each in sorted(finished, key=lambda pair: pair[0])]

    def _beyond(
        self, stage: int, settings: Sequence[Settings], tried: Sequence[Settings], scores: Scores
    ) -> list[Settings]:
        """Where the best of a stage lies at an edge of what was tried: the settings beyond it.

        tried: in the stages before.
        """
        ranked = self._ranked(stage, settings, scores)
        if not ranked:
            return []
        best, known, found = ranked[0], [*tried, *settings], []
        for name, value in best.items():
            # At full length a learning rate is held against others of full length alone.
            whole = name == "learning_rate" and stage == FULL
            values = sorted({each[name] for each in (settings if whole else known)})
            if len(values) == 1 and not whole:
                continue
            every = sorted({each[name] for each in known})
            sides = (side for side, end in ((-1, values[0]), (1, values[-1])) if value == end)
            found += [{**best, name: _next_value(name, value, every, side)} for side in sides]
        return [each for each in found if each not in settings]


def _next_value(name: str, value: float, tried: Sequence[float], side: int) -> float:
    """The value of a setting that follows one that was tried, below (-1) or above it (1).

    tried: in order; where it has none that follows, as far away as its neighbours are.
    """
    place = tried.index(value) + side
    if 0 <= place < len(tried):
        return tried[place]
    if name == "learning_rate":
        return float(f"{value * RATIO**side:.1e}")
    ratio = tried[1] / tried[0] if side < 0 else tried[-1] / tried[-2]
    further = float(f"{value * ratio**side:.3g}")
    return max(2, round(further)) if isinstance(value, int) else further


def row_searches(
    experiment: Experiment,
    size: Size,
    rows: Sequence[str] | None = None,
    share: float = 1 / 16,
    data: Path | None = None,
    rates: Sequence[float] = (),
    seeds: int = 1,
) -> list[RowSearch]:
    """The search of every row of an experiment, or of those named, in the table's order."""
    if not 0 < share <= _LATER[0]:
        raise ValueError(f"share must lie in (0, {_LATER[0]:g}], got {share}")
    firsts: dict[str, Cell] = {}
    for cell in experiment.cells(size, data):
        firsts.setdefault(cell.model, cell)
    unknown = set(rows or ()) - set(firsts)
    if unknown:
        known = ", ".join(firsts) or "none, for want of cells"
        raise ValueError(f"rows must be of {known}, got {', '.join(sorted(unknown))}")
    chosen = [cell for name, cell in firsts.items() if rows is None or name in rows]
    return [RowSearch(experiment, cell, share, tuple(rates), seeds) for cell in chosen]


def line_of(record: Record) -> Settings:
    """A finished trial as a line: what was tried, what it came to, and where.

    Its score is the bits of the whole validation split; of a row that is to be best at the longest
    lags (`Model.judged_by`), those of the last class.
    """
    cell, made_by = record["cell"], record["made_by"]
    classes = {name: each["bits"] for name, each in record.get("validation", {}).items()}
    judged = "all"
    if _for_long_lags(cell["model"]) and classes:
        judged = [name for name in classes if name != "all"][-1]
    speed = record.get("tokens_per_second")
    tokens = record["task"].get("length", 0) * record["training"].get("batch_size", 0)
    versions = ("vort", "torch", "numpy", "scipy", "python")
    return {
        "size": record["scale"],
        "experiment": record["experiment"],
        "row": cell["model"],
        "stage": cell["stage"],
        "share": cell.get("share", 1),
        "settings": _settings_in(cell["trial"]),
        "beyond": int((record.get("searched") or "").rpartition(_PAST_EDGE)[2] or 0),
        "seed": cell["seed"],
        "steps": record.get("steps"),
        "judged": judged,
        "score": classes.get(judged),
        "bits": classes,
        **({"error": record["error"]} if "error" in record else {}),
        "seconds": record.get("seconds"),
        "step_seconds": None if not speed else round(tokens / speed, 5),
        **{key: made_by.get(key) for key in ("device", "commit", "dirty", "code", "command")},
        "versions": {name: made_by.get(name) for name in versions},
        "fingerprint": record["fingerprint"],
        "of": _definition(record),
    }


def _for_long_lags(row: str) -> bool:
    return row in MODELS and MODELS[row].judged_by == "long"


def _settings_in(words: str) -> Settings:
    pairs = (word.partition("=") for word in words.split(" "))
    return {name: json.loads(value) for name, _, value in pairs}


def _definition(record: Record) -> str:
    """A short hash of a row as it was defined, whatever was tried of it and for how long."""
    tried = _settings_in(record["cell"]["trial"])
    parts = [
        {key: value for key, value in record[part].items() if key not in {*tried, *_LENGTHS}}
        for part in ("model", "training")
    ]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


# How long a training is, and how it is fed: no part of what a row is.
_LENGTHS = ("steps", "epochs", "workers", "checkpoint_every")


def collect(folder: Path, file: Path | None = None) -> int:
    """Take up the finished trials of a search's folder; how many were new. None is ever removed."""
    records = [
        record
        for part in sorted(path for path in folder.iterdir() if path.is_dir())
        for record in read_cells(part, []).values()
        if "trial" in record.get("cell", {})
    ]
    if not records:
        raise ValueError(f"no finished trial of vort tune in {folder}")
    return append([line_of(record) for record in records], file)


def append(lines: Sequence[Line], file: Path | None = None) -> int:
    """Add trials to the file, those that are not there yet; how many they were."""
    file = file or FILE
    known = {line.get("fingerprint") for line in read_lines(file)}
    new = [line for line in lines if line["fingerprint"] not in known]
    new = list({line["fingerprint"]: line for line in new}.values())
    if new:
        before = file.read_text() if file.exists() else ""
        write_atomically(file, before + "".join(json.dumps(line) + "\n" for line in new))
    return len(new)


def known_scores(
    searches: Sequence[RowSearch], folder: RunFolder, lines: Sequence[Line]
) -> dict[str, float | None]:
    """What finished trials came to, of this folder and of all that was taken up."""
    found = {x["fingerprint"]: x["score"] for x in lines if x.get("fingerprint") is not None}
    for name in {search.experiment.name for search in searches}:
        for record in read_cells(folder.part(name), []).values():
            if "trial" in record.get("cell", {}):
                found[record["fingerprint"]] = line_of(record)["score"]
    return found
