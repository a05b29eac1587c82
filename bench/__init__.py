"""The side-by-side benchmark: our runtime and its peers, same model, same token ids, one run."""
