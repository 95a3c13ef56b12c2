"""Changes the configuration of a saved run, as if it had been trained with another one."""

import json

from core.checkpoints import steps


def save_config(run_dir, text):
    """Makes `text` the configuration of a run and of all its checkpoints."""
    (run_dir / "config.gin").write_text(text)
    for step in steps.complete(run_dir / steps.FOLDER):
        folder = run_dir / steps.FOLDER / str(step)
        found = steps.read(folder)
        parts = {"step": step, "content": found.content, "streams": found.streams, "left_out": found.left_out}
        (folder / steps.PART / "metadata").write_text(json.dumps(steps.sealed({**found.meta, "config": text}, **parts)))
