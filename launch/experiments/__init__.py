"""Suites of experiments (`launch/run suite`) and scores of checkpoints (`launch/run evaluate`).

suite_plan.py     loads the experiments of a suite and finds duplicates
suite_runner.py   runs each experiment in its own process
results.py        one row per experiment, as CSV
scaling_law.py    fits accuracy as a function of the number of parameters
charts.py         charts of the results as SVG
results_page.py   the table and charts of the results as one HTML page
saved_run.py      finds runs, their configurations and their checkpoints on disk
held_out.py       selects the held-out rows of an evaluation
scores.py         evaluates checkpoints; writes and prints their scores
"""
