"""Parallelism: tensor, context, pipeline and expert parallel layers, their collectives and gradients."""
