"""One command per file, in folders by family: `add_arguments(parser)` adds its flags, `run(args)` runs it."""
