"""The Scheduler: one event in, a list of actions out; the same code is simulated and live."""
