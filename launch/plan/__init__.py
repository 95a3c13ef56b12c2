"""Plans a run without its slice: searches layouts, compiles them, and reports memory and time."""
