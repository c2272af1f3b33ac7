"""Models put to the test: suites of prompts for any causal model, answers that are right whole."""

from vort.lab.evaluation.exact import exact_matches, judged_answers, read_long
from vort.lab.evaluation.suite import (
    NeedleSuite,
    RulerSuite,
    Suite,
    read_records,
    run_suite,
    write_prompts,
)
from vort.lab.evaluation.writing import write

__all__ = [
    "NeedleSuite",
    "RulerSuite",
    "Suite",
    "exact_matches",
    "judged_answers",
    "read_long",
    "read_records",
    "run_suite",
    "write",
    "write_prompts",
]
