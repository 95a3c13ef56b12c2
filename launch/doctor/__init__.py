"""Whether a run could start here and now: on every host at once, with the fix beside every fault."""
