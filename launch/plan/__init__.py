"""Planning a run before there is a slice: searching layouts, compiling them, and reporting what they cost."""
