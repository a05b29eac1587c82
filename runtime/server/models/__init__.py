"""Served models: versions by uid, traffic between them, replicas, and changes of all that without losing a request."""
