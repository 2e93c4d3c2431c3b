"""Pipeline parallelism: a schedule is a table of actions that one executor runs.

actions, messages, schedules, verify, simulate and partition are pure (standard library only);
p2p and executor, which need torch, are imported by name and never from here.
"""
