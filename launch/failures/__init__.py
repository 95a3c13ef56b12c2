"""What happens to a run when something fails: faults planted into simulated hosts, and the run that comes after."""
