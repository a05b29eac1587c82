"""Serving: bundles behind OpenAI's HTTP API, WebSocket and gRPC, with quotas, metrics and hot replacement."""
