"""Load generator for live servers, open-loop and closed-loop, and the results it measures."""
