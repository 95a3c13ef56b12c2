"""Source code: problems that a model solves by writing programs, and files in chunks."""
