"""Source code: problems that a model solves by writing programs, and tasks of files cut into chunks."""
