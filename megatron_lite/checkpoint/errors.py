"""CheckpointError: a checkpoint that can't be written, found or used."""


class CheckpointError(Exception):
    """The message names the path, what is wrong with it and what can be done."""
