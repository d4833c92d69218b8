"""Planning: pure arithmetic over profiles and demand, which returns decisions as values."""
