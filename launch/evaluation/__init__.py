"""How good the checkpoints of a run are, without training: `launch/run evaluate`.

saved.py      a run as its directory has it: its configuration and its checkpoints
portion.py    which held-out rows are evaluated, and how that is said
measuring.py  one checkpoint on the devices: means, and the votes of its answers
results.py    what came of it as JSON, as tables and as a submission
"""
