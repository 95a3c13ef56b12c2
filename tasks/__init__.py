"""Data: text, chats, puzzles and seqio tasks, read as streams that do not depend on the number of hosts."""
