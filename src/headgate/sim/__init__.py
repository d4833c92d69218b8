"""The simulator: a discrete-event driver of the very Scheduler and Backend that serve live."""
