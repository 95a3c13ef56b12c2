"""One command per file, in folders by family; each offers `add_arguments(parser)` and `run(args) -> exit code`."""
