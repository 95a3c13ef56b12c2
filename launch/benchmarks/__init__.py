"""What `launch/run bench` measures: ratios between two things timed in one run.

overhead.py   the trainer's step against the bare jitted step
recursion.py  the recursive model's step against this machine's product of matrices
"""
