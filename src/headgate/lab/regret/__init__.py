"""The search for the worst case of a policy: random worlds, references, and a fluid bound."""
