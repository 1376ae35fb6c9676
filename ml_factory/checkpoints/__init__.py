"""Save and resume: checkpoint manager, phases, slots, leases, the save schedule and the session's remaining time."""
