"""Parts of the experiment `swayam`: services, oracles, runs, tables and figures."""
