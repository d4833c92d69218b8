"""Between gateway and workers: messages, shared memory, connections, crash markers."""
