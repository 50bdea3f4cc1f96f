"""Synthesis: training conversations from environments and any model, filtered by what they earned."""
