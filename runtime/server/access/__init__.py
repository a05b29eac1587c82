"""Who may ask, and how much: keys and quotas."""
