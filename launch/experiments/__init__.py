"""Suites of experiments (`launch/run suite`) and scores of checkpoints (`launch/run evaluate`)."""
