"""The HTTP front end: connections, requests, responses."""
