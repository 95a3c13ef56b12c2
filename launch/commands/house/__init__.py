"""The workspace: its own state and speed."""
