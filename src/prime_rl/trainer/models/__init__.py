"""Model code that is both trained and served."""
