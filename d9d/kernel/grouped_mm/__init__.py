"""Products of the rows of several groups with a matrix for each group, by torch and by other packages.

Axes: S rows, sorted by group, E groups, I inputs, O outputs.
"""
