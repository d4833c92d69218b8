"""The live runtime: a gateway, its workers, and their supervisor."""
