"""Demonstrations: Headgate end to end, live, sized to the machine they run on."""
