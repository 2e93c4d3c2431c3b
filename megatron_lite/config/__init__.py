"""One JSON file describes a run: what it may hold, how it is read, checked and printed.

Pure: nothing here imports torch, touches a device or starts a process group. `load.load_config` is
the way in.
"""
