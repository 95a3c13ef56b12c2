"""Commands that need no folder of their own (modules with `COMMAND`), and kinds of `make-dataset` (`DATASETS`)."""
