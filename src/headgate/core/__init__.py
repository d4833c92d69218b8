"""The core: records, events, actions, and the three pure machines that decide.

`Scheduler` (one per gateway), `Backend` (one per node) and `Broker` (one per shared pool). Nothing
in here imports anything but the standard library, reads a clock, or waits.
"""
