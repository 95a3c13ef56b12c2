"""Commands that fit in one file; `launch/__main__.py` lists all commands with their modules."""
