"""What a run reports: metrics.jsonl, console lines, curves, traces, throughput, time and memory.

Nothing here trains, communicates or decides; the trainer hands over finished numbers.
"""
