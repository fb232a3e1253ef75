"""The two entry points that measure: `profile_cluster` and `autotune`."""
