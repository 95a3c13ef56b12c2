"""Commands that need no folder of their own, and kinds of `make-dataset`."""
