"""`inferencex bench serve`: load on a running server, at a rate or at a concurrency; latencies and throughput."""
