"""What a run does about what goes wrong beside it, and how it goes on."""
