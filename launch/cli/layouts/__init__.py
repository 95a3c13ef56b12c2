"""Commands about layouts: memory, traffic and agreement of strategies, plans and schedules."""

import os

from parallel.hlo import messages

# Before jax is imported: these commands leave the chips to runs, and show the warnings of the TPU compiler.
os.environ.update(messages.AUDIBLE_WARNINGS, JAX_PLATFORMS="cpu")
