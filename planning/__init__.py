"""Beyond the paper's search: shorter iterations, a bound that proves them, nodes to stages, paths
for training."""
