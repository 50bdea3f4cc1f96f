"""Search of contexts: reflective mutation with a Pareto front over training examples."""
