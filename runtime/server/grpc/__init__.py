"""The gRPC interface: `inferencex.v1.InferenceService`, health and reflection, on the same service as HTTP."""
