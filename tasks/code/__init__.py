"""Problems that a model solves by writing programs, which run confined."""
