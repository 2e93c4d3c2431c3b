"""Errors that a person can act on: each message names the file or field, the fault and the remedy.

Raised by everything in megatron_lite.data; the tools print them and set the exit code.
"""


class DataError(Exception):
    """Input data, a data file or a data setting is unusable; the message says what to do."""


class TooSmallError(DataError):
    """A corpus, or its part, holds too few tokens for one sample."""


class WorkerDiedError(Exception):
    """A worker process ended without an answer; the message says which one and how."""
