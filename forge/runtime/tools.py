"""Tools that training code starts by module name. Modules outside `forge/tools/` must not import from that folder."""

PLANNER = "forge.tools.plan.command:plan"
PEAK_PLANNER = "forge.tools.plan.peak"
"""A module to run with `python -m`."""
TEXT_SAMPLES = "forge.tools.inference.text_samples:TextSamples"
TASK_SCORES = "forge.tools.inference.task_scores:TaskScores"
