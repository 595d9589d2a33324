"""The paper's arithmetic: what a model needs, what a cluster has, and how well the two go together.

Pure functions of numbers; nothing here moves a byte, except that `cluster.measure_here` looks at this machine.
"""
