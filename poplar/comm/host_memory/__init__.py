"""The transport between CPU ranks of one host: they read each other's memory."""
