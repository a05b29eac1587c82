"""A server for the tests of processes: python scripted_server.py PORT CASE."""

from __future__ import annotations

import sys
import threading

from tests.runtime.load_test.fake_server import FakeServer

if __name__ == "__main__":
    port, case = int(sys.argv[1]), sys.argv[2]
    if case == "ends":
        sys.exit("there is no such model")
    if case == "serves":
        with FakeServer(port=port):
            threading.Event().wait()
    threading.Event().wait()
