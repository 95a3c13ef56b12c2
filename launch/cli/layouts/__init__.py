"""Layouts: what a strategy does to chips, traffic and numbers."""

import os

from parallel.hlo import messages

# Before jax is imported: these commands leave the chips to runs, and show the warnings of the TPU compiler.
os.environ.update(messages.AUDIBLE_WARNINGS, JAX_PLATFORMS="cpu")
