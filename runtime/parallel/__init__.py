"""Several processes, called ranks, that run one model together: tensor parallelism."""
