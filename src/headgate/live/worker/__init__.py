"""The worker: one process per node, which runs functions as its `Backend` decides."""
