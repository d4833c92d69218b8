"""The environments, runs and tables of the experiment `dag-admission`."""
