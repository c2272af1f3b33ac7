"""From the results of cells to tables: means over seeds, intervals, verdicts against the paper."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vort.lab.experiments.experiment import Record, Summary
from vort.lab.experiments.models import MODELS
from vort.lab.experiments.search import EARLIER, FULL, Choice, choice_of, searched
from vort.lab.report.tables import Sheet
from vort.lab.tasks import TASKS
from vort.lab.training.metrics import Interval, interval
from vort.lab.verdicts import Claim, Verdict, judge_difference, judge_figure, judge_lead

__all__ = [
    "PaperTable",
    "as_planned",
    "by_row",
    "choices_of",
    "gain_in_words",
    "history_sheet",
    "label_of",
    "labels_of",
    "lead_in_points",
    "margin",
    "over_seeds",
    "rates_note",
    "row_of",
    "score_sheet",
    "seed_interval",
    "seeds_of",
    "show",
    "training_notes",
    "verdict",
    "verdict_on_gain",
    "with_origins",
    "within_seed",
]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: its label, the score it shows, and its figures by row and bucket.

    Attributes:
        label: by which the paper refers to it.
        score: "accuracy" (in percent, higher is better) or "bits" (lower is better).
        rows: the figures, one for each bucket of the task, in order.
        tolerance: what counts as the same figure where seeds say nothing closer.
    """

    label: str
    score: str
    rows: Mapping[str, tuple[float, ...]]
    tolerance: float

    @property
    def factor(self) -> int:
        """From our figures to the paper's: accuracies are percentages there."""
        return 100 if self.score == "accuracy" else 1

    @property
    def sign(self) -> int:
        """1 where higher is better, else -1."""
        return 1 if self.score == "accuracy" else -1


def row_of(record: Record) -> str:
    """The row that a result stands in: its model, and what was changed of it with `--set`.

    >>> row_of({"cell": {"model": "vort", "set": "model.num_scales=4"}})
    'vort [model.num_scales=4]'
    """
    model, changes = record["cell"]["model"], record["cell"].get("set")
    return model if changes is None else f"{model} [{changes}]"


def label_of(row: str) -> str:
    """What tables call a row."""
    model, bracket, changes = row.partition(" [")
    label = MODELS[model].label if model in MODELS else model.replace("_", " ")
    return label + bracket + changes


def labels_of(records: Sequence[Record]) -> dict[str, str]:
    """What tables call the models of results, by their names."""
    models = (record["cell"]["model"] for record in records)
    return {model: label_of(model) for model in models}


def by_row(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Results by row, in the order they come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(row_of(record), []).append(record)
    return found


def as_planned(records: Sequence[Record]) -> list[Record]:
    """Those of unchanged settings: claims are about no others."""
    return [record for record in records if "set" not in record["cell"]]


def over_seeds(
    records: Sequence[Record], bucket: str, score: str, factor: int = 1
) -> Interval | None:
    """Mean and interval of a score over the seeds that have it.

    Several results of one seed (at several beta, say) are averaged first: they share weights and
    data, and are no further seeds.
    """
    pairs = [
        (record["cell"]["seed"], factor * record["test"][bucket][score])
        for record in records
        if bucket in record.get("test", {})
    ]
    return seed_interval(pairs)


def seed_interval(pairs: Iterable[tuple[int, float]]) -> Interval | None:
    """Mean and interval over seeds of values that have one each; several of a seed count once.

    >>> found = seed_interval([(0, 1.0), (0, 3.0), (1, 4.0)])
    >>> found.mean, found.count
    (3.0, 2)
    """
    by_seed: dict[int, list[float]] = {}
    for seed, value in pairs:
        by_seed.setdefault(seed, []).append(value)
    means = [sum(values) / len(values) for values in by_seed.values()]
    return interval(means) if means else None


def verdict(paper: float, ours: Interval, table: PaperTable) -> Verdict:
    """Our figure against the paper's; see `vort.lab.verdicts.judge_figure`."""
    gain = Interval(table.sign * (ours.mean - paper), ours.half, ours.count)
    return judge_figure(gain, table.tolerance)


def verdict_on_gain(paper: float, ours: Interval, table: PaperTable) -> Verdict:
    """A difference between two rows against the paper's; see `judge_difference`."""
    return judge_difference(ours, paper, table.tolerance)


def margin(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> Interval | None:
    """How much better `ours` is in a bucket, over the seeds they share; None if there are none.

    Pairs are results of one seed under one condition; those of several conditions are averaged
    within their seed.
    """
    pairs = [
        (a["cell"]["seed"], table.sign * table.factor * (x - y))
        for a, b in _pairs(ours, rival)
        for x, y in [[record["test"][bucket][table.score] for record in (a, b)]]
    ]
    return seed_interval(pairs)


def _pairs(ours: Sequence[Record], rival: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Results of two rows that share seed, task and condition."""

    def place(record: Record) -> tuple[Any, ...]:
        return tuple(v for k, v in sorted(record["cell"].items()) if k != "model")

    others = {place(record): record for record in rival}
    return [(record, others[place(record)]) for record in ours if place(record) in others]


def within_seed(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> Interval | None:
    """How much better `ours` is in the one seed they share, and its interval over sequences.

    Both were asked the same sequences, so these are compared pair by pair. It says how far other
    test data would move the difference, and nothing of other weights: no verdict rests on it. None
    where there are several seeds, or no counts for each sequence. Its `count` is of sequences.
    """
    from scipy.stats import t  # takes longer to load than most tables to make

    pairs = _pairs(ours, rival)
    if len(pairs) != 1 or table.score != "accuracy":
        return None
    answers = [_answers(record, bucket) for record in pairs[0]]
    (right, asked), (other, same) = answers
    if len(asked) < 2 or not np.array_equal(asked, same) or not asked.sum():
        return None
    gains, total = right - other, asked.sum()
    mean = gains.sum() / total
    # Sequences have unequally many questions: the deviation of a ratio.
    rest = gains - mean * asked
    count = len(asked)
    error = np.sqrt(count / (count - 1) * (rest**2).sum()) / total
    factor = table.sign * table.factor
    half = float(t.ppf(0.975, count - 1) * error)
    return Interval(float(factor * mean), abs(factor) * half, count)


def _answers(record: Record, bucket: str) -> tuple[Any, Any]:
    """Right answers and questions of each sequence; none where a result does not have them."""
    words = record.get("sequences", {}).get(bucket, "").split()
    found = np.array([word.split("/") for word in words], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def gain_in_words(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> str:
    """A difference between two rows with all that is known of how far it can be trusted."""
    gain = margin(ours, rival, bucket, table)
    if gain is None:
        return ""
    digits, unit = (1, "points") if table.score == "accuracy" else (3, "bits less")
    words = f"{show(gain, digits)} {unit}, {seeds_of(gain)}"
    inner = within_seed(ours, rival, bucket, table)
    if inner is not None:
        words += f" (± {inner.half:.{digits}f} over its {inner.count:,} sequences)"
    return words


def lead_in_points(states: str, gains: Mapping[str, Interval | None]) -> list[Claim]:
    """The claim that a row of ours is ahead of every rival, told by the closest; none: no rivals.

    states: the claim in words.
    gains: by rival, in points; None where they share no seed.
    """
    known = {row: gain for row, gain in gains.items() if gain is not None}
    if not known:
        return []
    closest = min(known, key=lambda row: known[row].mean)
    gain = known[closest]
    measured = f"closest is {label_of(closest)}: {show(gain, 1)} points, {seeds_of(gain)}"
    return [Claim("ours", states, measured, judge_lead(list(known.values())))]


def seeds_of(value: Interval) -> str:
    """How many seeds stand behind a figure, in words."""
    return "one seed" if value.count == 1 else f"{value.count} seeds"


def rates_note(records: Sequence[Record], label: Callable[[str], str] = label_of) -> str:
    """The learning rate of each row, and which were not searched."""
    # A row whose seeds were trained at several rates names them all.
    rates = {
        row: " and ".join(f"{x:g}" for x in sorted({r["training"]["learning_rate"] for r in own}))
        for row, own in by_row(records).items()
    }
    unsearched = {row_of(r) for r in records if r.get("searched") is False}
    if len(set(rates.values())) == 1:
        every = ", not searched" if unsearched == set(rates) else ""
        rate = f"Learning rate: {next(iter(rates.values()))} for all{every}."
        return rate + _earlier(records, label) + _short_of_a_search(records, label)
    shown = [
        f"{label(row)} {rate}" + (" (not searched)" if row in unsearched else "")
        for row, rate in rates.items()
    ]
    said = _earlier(records, label) + _short_of_a_search(records, label)
    return f"Learning rate: {'; '.join(shown)}.{said}"


def _earlier(records: Sequence[Record], label: Callable[[str], str]) -> str:
    """Which rates come from before there was a search in stages."""
    # Records of before say whose search they used, if any, and not which.
    taken = [r for r in records if r.get("searched")]
    old = dict.fromkeys(row_of(r) for r in taken if r.get("searched_in", EARLIER) == EARLIER)
    if not old:
        return ""
    whose = "" if set(old) == {row_of(r) for r in records} else f" of {'; '.join(map(label, old))}"
    return f" Rates{whose} from the earlier search (short trials)."


def _choice(record: Record) -> Choice | None:
    """How the rate of a result was chosen in stages; None where it was not."""
    search, size = record.get("searched"), record.get("scale", "paper")
    if not search or record.get("searched_in", EARLIER) == EARLIER:
        return None
    found = searched(search, size)
    if found is not None and found["learning_rate"] == record["training"]["learning_rate"]:
        return choice_of(search, size)
    return Choice(int(record["searched_in"].removeprefix("stage ")), 0, 0, False)


def choices_of(records: Sequence[Record]) -> dict[str, Choice]:
    """How the rates of rows were chosen, of those that were searched in stages."""
    found = {}
    for row, members in by_row(records).items():
        every = [choice for record in members if (choice := _choice(record)) is not None]
        if every:
            found[row] = min(every, key=lambda choice: choice.stage)
    return found


def _short_of_a_search(records: Sequence[Record], label: Callable[[str], str]) -> str:
    """Whose rates no full-length trial chose, and whose lie at the edge of what was tried."""
    choices, rows = choices_of(records), {row_of(record) for record in records}

    def names(chosen: Sequence[str]) -> str:
        return "all" if set(chosen) == rows else "; ".join(map(label, chosen))

    said, short = "", {row: choice for row, choice in choices.items() if choice.stage < FULL}
    if short:
        kinds: dict[str, list[str]] = {}
        for row, choice in short.items():
            trials = f"{choice.trials} of {choice.steps:,} steps" if choice.trials else "Short ones"
            kinds.setdefault(trials, []).append(row)
        said += " Chosen by short trials, none of them of full length. "
        said += " ".join(f"{trials}: {names(chosen)}." for trials, chosen in kinds.items())
    edge = [row for row, choice in choices.items() if choice.at_edge]
    if edge:
        said += f" At the edge of the rates that were tried at that length: {names(edge)}."
    return said


def training_notes(records: Sequence[Record], *, paper: bool = True) -> list[str]:
    """How the models of a table were trained, and what its intervals are.

    paper: whether the table has figures of the paper.
    """
    steps = sorted({record["steps"] for record in records if "steps" in record})
    sizes = sorted({record["parameters"] for record in records})
    return [
        f"Parameters: {sizes[0]:,} to {sizes[-1]:,}. State: numbers kept for one sequence while "
        "decoding."
        + (
            " The paper's figure and the verdict are on the last class, the one its claim is about."
            if paper
            else ""
        ),
        f"Optimiser steps: {', '.join(f'{s:,}' for s in steps)}. {rates_note(records)}",
        _seeds_note(records),
    ]


def _seeds_note(records: Sequence[Record]) -> str:
    """How many seeds there are, and which rows have fewer."""
    rows: dict[int, list[str]] = {}
    for row, members in by_row(records).items():
        rows.setdefault(len({r["cell"]["seed"] for r in members}), []).append(label_of(row))
    most = max(rows)
    if most == 1:
        return "One seed: no intervals."
    fewer = [f" {n} of {'; '.join(rows[n])}." for n in sorted(rows, reverse=True) if n < most]
    return f"{most} seeds.{''.join(fewer)} Intervals are 95 %, Student's t."


def show(value: Interval | None, digits: int) -> str:
    """A mean with its interval, where there is one."""
    if value is None:
        return "–"
    if value.count < 2:
        return f"{value.mean:.{digits}f}"
    return f"{value.mean:.{digits}f} ± {value.half:.{digits}f}"


def score_sheet(
    title: str,
    records: Sequence[Record],
    buckets: Sequence[str],
    table: PaperTable,
    *,
    label: Callable[[str], str] = label_of,
) -> Sheet:
    """A line for each row: state, every bucket, the paper's figure for the last, and the verdict.

    Models of a table have equally many parameters; the notes say how many. Where some were trained
    for longer than others, a column says how long.
    """
    digits = 1 if table.score == "accuracy" else 3
    lengths = {record.get("steps") for record in records}
    rows = []
    for row, members in by_row(records).items():
        cells = [over_seeds(members, bucket, table.score, table.factor) for bucket in buckets]
        # Rows with changed settings are no row of the paper.
        name = MODELS[row].paper_row if row in MODELS else ""
        paper = table.rows.get(name)
        judged = "" if paper is None or cells[-1] is None else verdict(paper[-1], cells[-1], table)
        first = members[0]
        rows.append(
            [
                label(row),
                *([f"{first['steps']:,}"] if len(lengths) > 1 else []),
                f"{first['state_numbers']:,}",
                *(show(cell, digits) for cell in cells),
                "" if paper is None else f"{paper[-1]:g}",
                judged,
            ]
        )
    steps = ["steps"] if len(lengths) > 1 else []
    return Sheet(title, ["model", *steps, "state", *buckets, "paper", "verdict"], rows)


def with_origins(
    summary: Summary, name: str, records: Sequence[Record], other: Sequence[str]
) -> Summary:
    """A summary that says of which commits its cells are, and marks rows of other settings.

    A double dagger: cells of other settings than are planned now. A claim about rows that were not
    made alike is undecided.

    Args:
        summary: of these records.
        name: of the experiment; what it uses of others is told apart.
        records: results with `made_by`.
        other: rows with cells of other settings.
    """
    if not records:
        return summary

    def label(row: str) -> str:
        model, bracket, changes = row.partition(" [")
        return summary.labels.get(model, label_of(model)) + bracket + changes

    marks = {label(row): " ‡" for row in other}
    sheets = [
        Sheet(
            s.title, s.headings, [[line[0] + marks.get(line[0], ""), *line[1:]] for line in s.rows]
        )
        for s in summary.sheets
    ]
    notes: list[str] = []
    sources: dict[str, list[Record]] = {}
    for record in records:
        sources.setdefault(record.get("experiment", name), []).append(record)
    for source, members in sources.items():
        versions = _versions(members)
        if source == name and len(versions) > 1:
            sheets.append(_commits_sheet(members, versions, label))
            notes.append("Commits of one letter have the same kernels and the same model.")
        else:
            commits = list(dict.fromkeys(map(_commit_of, members)))
            whose = "" if source == name else f" of {source}"
            notes.append(f"Cells{whose}: {_joined(commits)}.")
    if other:
        names = "; ".join(label(row) for row in other)
        notes.append(f"‡ made with other settings than are planned now: {names}.")
    choices = choices_of(records)
    verdicts = [_of_rows_made_alike(claim, other, choices, label) for claim in summary.verdicts]
    return replace(summary, sheets=sheets, verdicts=verdicts, notes=[*summary.notes, *notes])


def _versions(records: Sequence[Record]) -> dict[str, str]:
    """A letter for each version of the kernels and the model: commits with the same source."""
    codes = dict.fromkeys(record.get("made_by", {}).get("code", "") for record in records)
    return {code: chr(ord("A") + i % 26) * (1 + i // 26) for i, code in enumerate(codes)}


def _commits_sheet(
    records: Sequence[Record], versions: Mapping[str, str], label: Callable[[str], str]
) -> Sheet:
    """Of every row the commits that its cells were made at, and which seeds at which."""
    lines = []
    for row, members in by_row(records).items():
        seeds: dict[str, dict[int, None]] = {}
        for record in members:
            letter = versions[record.get("made_by", {}).get("code", "")]
            own = seeds.setdefault(f"{_commit_of(record)} ({letter})", {})
            own[record["cell"]["seed"]] = None
        each = [f"{commit}: {', '.join(map(str, sorted(own)))}" for commit, own in seeds.items()]
        lines.append([label(row), "; ".join(each if len(each) > 1 else seeds)])
    return Sheet("Commits that made the cells", ["model", "commit, and its seeds"], lines)


def _joined(words: Sequence[str]) -> str:
    return ("commit " if len(words) == 1 else "commits ") + ", ".join(words)


def _of_rows_made_alike(
    claim: Claim, other: Sequence[str], choices: Mapping[str, Choice], label: Callable[[str], str]
) -> Claim:
    """A claim as it is, or undecided where only some of its rows were made as is planned now.

    Or where the rates of some were chosen by shorter trials than those of others.
    """
    waiting = [row for row in claim.rows if row in other]
    if waiting and len(waiting) < len(claim.rows):
        names = " and ".join(map(label, waiting))
        why = f"nothing is decided before {names} has the settings planned now (‡)"
        return replace(claim, measured=f"{claim.measured}; {why}", verdict="undecided")
    stages = {row: choices[row].stage for row in claim.rows if row in choices}
    short = [row for row, stage in stages.items() if stage < max(stages.values())]
    if short:
        names = " and ".join(map(label, short))
        why = f"nothing is decided before rates of {names} were tried at full length too"
        return replace(claim, measured=f"{claim.measured}; {why}", verdict="undecided")
    return claim


def _commit_of(record: Record) -> str:
    """Of which commit a result is."""
    made_by = record.get("made_by", {})
    if "code" not in made_by:
        committed = made_by.get("committed_in", "")
        return "before commits were kept" + (f" (committed in {committed})" if committed else "")
    changed = " with changes" if made_by.get("dirty") else ""
    return str(made_by.get("commit", "unknown"))[:7] + changed


def history_sheet(
    past: Sequence[Record],
    records: Sequence[Record],
    figure: tuple[str, Callable[[Record], float | None]] | None = None,
) -> Sheet | None:
    """What stood in a table before: its figure in the last class then and now, and why it went.

    Several seeds of a row that went together are one line. None where nothing was replaced.

    Args:
        past: results of the history.
        records: those of today.
        figure: what to show instead of the last class: a heading, and a result's percentage.
    """
    heading, percentage = ("last class", _last_class) if figure is None else figure
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in past:
        if percentage(record) is not None:
            groups.setdefault(_replacement(record), []).append(record)
    rows = []
    # Generation by generation: a cell's oldest comes first.
    order = list(dict.fromkeys(made for _, _, _, made, _ in groups))
    for key in sorted(groups, key=lambda key: order.index(key[3])):
        row, place, trained, made, reason = key
        members = groups[key]
        seeds = {member["cell"]["seed"] for member in members}
        today = [
            record
            for record in records
            if (row_of(record), _place(record)) == (row, place) and record["cell"]["seed"] in seeds
        ]
        in_bits = figure is None and TASKS[members[0]["cell"]["task"]].score == "bits"
        then, now = (
            seed_interval((r["cell"]["seed"], x) for r in side if (x := percentage(r)) is not None)
            for side in (members, today)
        )
        digits = 3 if in_bits else 1
        bits = [member["validation"]["all"]["bits"] for member in members]
        rows.append(
            [
                label_of(row) + (f", {place}" if place else ""),
                trained,
                f"{sum(bits) / len(bits):.3f}",
                *(show(then, digits), show(now, digits)),
                *(made, reason),
            ]
        )
    if not rows:
        return None
    headings = ["model", "steps, rate", "validation bits", f"{heading} then", "now", "made", "why"]
    return Sheet("Results that were replaced", headings, rows)


def _last_class(record: Record) -> float | None:
    """A result's score in the last class of its test split, accuracies in percent."""
    classes = [name for name in record.get("test", {}) if name != "all"]
    if not classes:
        return None
    score = TASKS[record["cell"]["task"]].score
    return float((100 if score == "accuracy" else 1) * record["test"][classes[-1]][score])


def _replacement(record: Record) -> tuple[str, ...]:
    """What results that went together have in common."""
    trained = f"{record.get('steps', 0):,} at {record['training'].get('learning_rate'):g}"
    reason = record.get("replaced", {}).get("reason") or "no reason was given"
    return row_of(record), _place(record), trained, _commit_of(record), reason


def _place(record: Record) -> str:
    """Further coordinates of a result, in words."""
    known = ("task", "model", "seed", "set")
    return ", ".join(f"{k} {v}" for k, v in record["cell"].items() if k not in known)
