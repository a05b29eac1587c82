"""Native code of the engine, built from the C++ beside this file."""
