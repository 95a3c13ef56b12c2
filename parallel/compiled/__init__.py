"""Programs for a slice: compiling, HLO, traffic, lints."""
