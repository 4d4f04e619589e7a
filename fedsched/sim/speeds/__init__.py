"""How fast simulated jobs train: models of the truth, what slows jobs down, and what others may know of it.

Every model is a `SpeedModel` (fedsched.sim.ports). Models of what scales how: `table` (measured), `analytic` (Optimus's
form), `scaling` (GPUs of several types), `goodput` (Pollux's form), `recorded` (a trace's own durations). Modifiers
wrap a model and each other: `spread`, `interference`, `stragglers`, `noise`. Estimates: `declared` (wrong lengths),
`oracle` (what a policy is told of speeds). `costs` says how long the scaling verbs take, `config` is the YAML of all.
"""
