"""Our server beside its peers' and beside our engine without one."""
