"""The live runtime: a gateway, its workers, and the supervisor of both."""
