"""Reads optimized HLO programs: instructions, how often each runs, and its estimated cost."""
