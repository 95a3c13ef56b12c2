"""What is known of a run before there is a slice to run it on: recorded compilations, and plans."""
