"""What a server is told: the settings, their defaults, and the files, variables and flags they come from."""
