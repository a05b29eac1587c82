"""Requests and responses of the HTTP API, field by field; the OpenAPI document is made from these."""
