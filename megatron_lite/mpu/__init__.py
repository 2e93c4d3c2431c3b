"""The grid of ranks and what runs on it: groups, autograd collectives, random streams."""
