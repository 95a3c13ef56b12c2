"""A run under way: what hangs on its loop, and how the loop goes on after trouble."""
