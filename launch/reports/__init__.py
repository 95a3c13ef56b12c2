"""What `launch/run report` prints: where arrays live, what one compiled step costs, and strategies side by side."""
