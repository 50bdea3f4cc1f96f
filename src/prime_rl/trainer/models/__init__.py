"""Model code shared by trainer and embedded engine."""
