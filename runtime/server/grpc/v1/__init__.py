"""Version 1 of the interface: `inference.proto`, and the modules that protoc makes of it."""
