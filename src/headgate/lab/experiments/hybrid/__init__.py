"""What the comparison of hybrid policies on traces shares."""
