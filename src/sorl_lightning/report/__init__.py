"""One HTML file that shows a run, or compares several: docs/report.md."""
