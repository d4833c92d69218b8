"""Long texts are parsed and written in a process of their own, so that nobody else waits."""
