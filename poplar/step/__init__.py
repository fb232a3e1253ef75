"""One description of a step, without torch and without durations: units, actions, bytes."""
