"""Many experiments, one after another: `launch/run suite`.

plan.py      which experiments, with which seeds; which of them are one and the same
running.py   a process for each; what is done already is not done again, what fails does not stop the rest
measured.py  what a run left: its metrics, and whether it came to its end
results.py   one row for each experiment; CSV
analysis.py  accuracy as a law in the number of parameters
plots.py     the same as pictures, inline SVG
page.py      one page of HTML that needs nothing else
"""
