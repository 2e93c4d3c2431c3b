"""Preflight: before minutes are spent on a model, do all nodes agree, see the same folders, and
reach each other? In under a minute, and with the rank and node of what is wrong.

`nodes` comes before any process group is there, through the job's store alone; `groups` after.
"""
