"""Frontiers: the Pareto sets of (time, cost) of functions, suffixes and pipelines, with configs.

`configs` has the candidate configurations of a stage, `pareto` the sets and how they compose,
`graph` the structure of a pipeline, `prime` the parts that are neither series nor parallel,
`pipeline` the frontier of a whole pipeline and of its rest behind a stage, `candidates` what is
declared as input to it, `decision` the choice of a stage's configuration, and `slo_split` the
distribution of an objective over groups of stages. docs/frontier.md says what is exact.
"""
