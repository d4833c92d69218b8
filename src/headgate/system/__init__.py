"""A thin layer over the operating system: child processes, memory, threads."""
