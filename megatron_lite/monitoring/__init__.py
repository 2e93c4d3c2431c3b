"""What a run reports: metrics.jsonl, console lines, TensorBoard, throughput, time and memory.

Nothing here trains, communicates or decides; the trainer hands over finished numbers.
"""
