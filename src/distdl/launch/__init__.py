"""From a composed config to a job: plan, start, follow, sweep, resume."""
