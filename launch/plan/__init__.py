"""Plans a run without a slice: searches layouts, compiles them, and reports memory and time."""
