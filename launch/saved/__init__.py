"""What a run has saved, looked at from one machine: listed, verified, compared, and cleared away."""
