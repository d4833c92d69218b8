"""The nodes of Ray pools, in a process that all gateways of a server share."""
