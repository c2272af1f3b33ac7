"""Models put to the test: suites of prompts for any causal model, answers that are right whole."""

from vort.lab.evaluation.exact import exact_matches
from vort.lab.evaluation.suite import NeedleSuite, RulerSuite, Suite, read_records, run_suite
from vort.lab.evaluation.writing import write

__all__ = [
    "NeedleSuite",
    "RulerSuite",
    "Suite",
    "exact_matches",
    "read_records",
    "run_suite",
    "write",
]
