"""The files of a checkpoint: written aside, verified while they are read."""
