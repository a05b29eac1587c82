"""The names and versions of what graphs import, for those who need no schemas: these bring all of `onnx`."""

DOMAIN = "inferencex"
VERSION = 1
OPSET = 23
