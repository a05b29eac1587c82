"""Command line parts that all of the entry points share, and the umbrella command."""
