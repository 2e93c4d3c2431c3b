"""Who of a job still lives. Knows nothing of training; the session asks."""
