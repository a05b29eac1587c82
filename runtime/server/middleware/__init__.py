"""What happens around every HTTP request: ids, logs, keys, limits on bodies. Plain ASGI, to leave streams alone."""
