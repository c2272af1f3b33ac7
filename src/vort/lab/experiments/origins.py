"""How the rows of a table were made: rates and seeds, commits, and what stood there before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vort.lab.experiments.experiment import Record, Summary
from vort.lab.experiments.scores import by_row, label_of, row_of, seed_interval, show
from vort.lab.experiments.search import EARLIER, FULL, Choice, choice_of, searched
from vort.lab.report.tables import Sheet
from vort.lab.tasks import TASKS
from vort.lab.verdicts import Claim

__all__ = ["choices_of", "history_sheet", "rates_note", "training_notes", "with_origins"]


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
        return rate + _told(records, label)
    shown = [
        f"{label(row)} {rate}" + (" (not searched)" if row in unsearched else "")
        for row, rate in rates.items()
    ]
    return f"Learning rate: {'; '.join(shown)}.{_told(records, label)}"


def _told(records: Sequence[Record], label: Callable[[str], str]) -> str:
    """Where rates come from, as far as it is not each row's own search in full."""
    parts = (_of_others(records, label), _earlier(records, label))
    return "".join(parts) + _short_of_a_search(records, label)


def _of_others(records: Sequence[Record], label: Callable[[str], str]) -> str:
    """Which rows have the rate that was found for another."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        experiment, _, whose = str(record.get("searched") or "").partition("/")
        if whose and whose != row_of(record):
            elsewhere = "" if experiment == record.get("experiment") else f" in {experiment}"
            found.setdefault(label(whose) + elsewhere, {})[row_of(record)] = None
    said = [f"{'; '.join(map(label, rows))}: for {whose}" for whose, rows in found.items()]
    return f" Found for another row: {'. '.join(said)}." if said else ""


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
    several: dict[int, list[str]] = {}
    for row, choice in choices.items():
        if choice.seeds > 1:
            several.setdefault(choice.seeds, []).append(row)
    for seeds, chosen in several.items():
        said += f" The lowest mean over {seeds} seeds: {names(chosen)}."
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


def with_origins(
    summary: Summary, name: str, records: Sequence[Record], others: Mapping[str, Sequence[str]]
) -> Summary:
    """A summary that says of which commits its cells are, and marks rows of other settings.

    A double dagger: cells of other settings than are planned now. A claim about rows that were not
    made alike is undecided.

    Args:
        summary: of these records.
        name: of the experiment; what it uses of others is told apart.
        records: results with `made_by`.
        others: rows with cells of other settings, by experiment; those of this one are marked, of
            those of others a note tells.
    """
    if not records:
        return summary

    def label(row: str) -> str:
        model, bracket, changes = row.partition(" [")
        return summary.labels.get(model, label_of(model)) + bracket + changes

    other = others.get(name, ())
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
    for source, made in sources.items():
        versions = _versions(made)
        if source == name and len(versions) > 1:
            sheets.append(_commits_sheet(made, versions, label))
            notes.append("Commits of one letter have the same kernels and the same model.")
        else:
            commits = list(dict.fromkeys(map(_commit_of, made)))
            whose = "" if source == name else f" of {source}"
            notes.append(f"Cells{whose}: {_joined(commits)}.")
    if other:
        names = "; ".join(label(row) for row in other)
        notes.append(f"‡ made with other settings than are planned now: {names}.")
    for source, members in others.items():
        if source != name:
            names = "; ".join(map(label, members))
            notes.append(f"Of {source}, made with other settings than are planned now: {names}.")
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
