"""One run on this host: from an experiment to a trained model, and what is printed and written meanwhile."""
