"""Synthesis of training conversations from environments and any model, filtered by reward."""
