"""Messages, shared memory and connections between gateway and workers; crash markers."""
