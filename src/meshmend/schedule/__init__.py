"""Who sends what, when: the schedule table, its hazards, and one builder per algorithm."""
