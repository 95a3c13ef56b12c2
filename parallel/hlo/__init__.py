"""What a compiled program does, read from its optimized HLO: instructions, how often each runs, what it costs."""
