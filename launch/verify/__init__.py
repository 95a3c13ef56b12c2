"""Compares runs number by number: strategies with one device (agreement), two variants of one run (bisect)."""
