"""`python -m tests.soak`: a server under 200 users of all kinds, for minutes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.runtime.server.serving import CHAT_TEMPLATE, write_tiny_bundle
from tests.soak.run import report, soak, terminate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--clients", type=int, default=200, help="users at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=180.0, help="length of the load (%(default)g)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = write_tiny_bundle(folder / "bundles", CHAT_TEMPLATE)
        soaked = soak(bundle, folder, options.clients, options.seconds)
        print("\n".join(report(soaked)))
        soaked.check()
        terminate(bundle, folder, options.clients, min(options.seconds, 5.0)).check()
    print("the server came through")


if __name__ == "__main__":
    main()
