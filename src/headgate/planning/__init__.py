"""Planning: pure arithmetic over profiles and demand. Policies import it; it decides nothing."""
