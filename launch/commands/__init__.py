"""One command per file; each offers `add_arguments(parser)` and `run(args) -> exit code`."""
