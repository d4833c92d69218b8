"""Demonstrations: the whole of Headgate at work, live, on whatever machine they are run on."""
