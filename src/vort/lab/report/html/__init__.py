"""The report: everything in a run directory, on one page that works offline."""

from vort.lab.report.html.page import report_page, write_report_page
from vort.lab.report.html.run_directory import Experiment, Run, read_run

__all__ = ["Experiment", "Run", "read_run", "report_page", "write_report_page"]
